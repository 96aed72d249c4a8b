"""The generating side of the demo: one vLLM engine on CPU, inside this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from vllm import LLM

MAX_TOKENS = 8
SEED = 0


def prepare_environment() -> None:
    """Sets what vLLM and OpenMP read on import; call it before torch is imported anywhere."""
    defaults = {
        # The engine runs in this process and on the CPUs that this process may use.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # vLLM would fall back to one thread for serving; the trainers sleep while it generates.
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        # Waiting threads sleep: spinning ones starve the others when the cores are shared.
        "OMP_WAIT_POLICY": "PASSIVE",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


class Rollout(msgspec.Struct, frozen=True):
    """One sampled completion as the engine returned it.

    Attributes:
        prompt_ids: Token ids of the prompt.
        token_ids: Token ids of the completion.
        logprobs: Natural-log probability of each of them when it was drawn (temperature 1).
        text: The completion without its stop string.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str


class Engine:
    """vLLM serving one checkpoint directory in bf16.

    Args:
        checkpoint: Directory with weights and tokenizer.
    """

    def __init__(self, checkpoint: Path) -> None:
        from vllm import LLM

        self.llm: LLM = LLM(
            str(checkpoint),
            dtype="bfloat16",
            enforce_eager=True,
            max_model_len=128,
            # The smallest block on CPU: prompts of more than 32 tokens are served from the prefix
            # cache, so a refit that left it alone would show in the tokens compared at the end.
            block_size=32,
            enable_prefix_caching=True,
            seed=SEED,
            worker_extension_cls="weight_sync.vllm.worker_extension.WeightSyncExtension",
            generation_config="vllm",
        )

    def sample(self, prompts: list[str], group: int) -> list[list[Rollout]]:
        """Draws ``group`` completions of every prompt at temperature 1, up to the line's end."""
        from vllm import SamplingParams

        params = SamplingParams(
            n=group, temperature=1.0, max_tokens=MAX_TOKENS, stop=["\n"], logprobs=0
        )
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [
            [
                Rollout(
                    prompt_ids=list(output.prompt_token_ids or ()),
                    token_ids=list(c.token_ids),
                    logprobs=[
                        at[token].logprob
                        for at, token in zip(c.logprobs or (), c.token_ids, strict=True)
                    ],
                    text=c.text,
                )
                for c in output.outputs
            ]
            for output in outputs
        ]

    def greedy(self, prompts: list[str], tokens: int) -> list[list[int]]:
        """The ``tokens`` most likely next tokens of every prompt, one prompt at a time."""
        from vllm import SamplingParams

        # Alone, so that two engines compute the same batches and their tokens can be compared.
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return [
            list(self.llm.generate([p], params, use_tqdm=False)[0].outputs[0].token_ids)
            for p in prompts
        ]
