"""The generating side of the demo: vLLM behind the facade, engines in Ray actors of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import ray
import torch
from transformers import AutoTokenizer

from generation import RayCluster, VllmConfig, VllmGeneration, VllmSpecificArgs
from generation.batch import Batch

SAMPLED_TOKENS = 8
GREEDY_TOKENS = 24
SEED = 0


@contextmanager
def local_ray(gpus: int) -> Iterator[None]:
    """Ray on this machine; it ends within a minute when this process is killed.

    Args:
        gpus: An engine for each; 0 for one on the CPU.
    """
    # Ray would end the engine when the machine is short of memory, whoever uses that memory.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    # Ray would let the engine run only when nobody else wants the cores.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local",
        num_cpus=gpus or 1,
        num_gpus=gpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=128 * 1024**2,
    )
    try:
        yield
    finally:
        ray.shutdown()


def engine_environment(on_cpu: bool) -> dict[str, str]:
    """What vLLM and OpenMP read in the engine's process."""
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    if not on_cpu:
        return quiet
    return {
        **quiet,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Ray would give it one thread; the trainers sleep while it generates.
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        # Waiting threads sleep: spinning ones starve the trainers.
        "OMP_WAIT_POLICY": "PASSIVE",
    }


class Rollout(msgspec.Struct, frozen=True):
    """One completion as the engine returned it.

    Attributes:
        prompt_ids: Token ids of the prompt.
        token_ids: Token ids of the completion, its stop string included.
        logprobs: Natural-log probability of each of them when it was drawn (temperature 1).
        text: The completion.
        versions: Weight versions that its tokens were generated with.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    versions: set[int]


class Engine:
    """A fleet of vLLM engines in bf16. A context manager: leaving it ends their processes.

    Args:
        checkpoint: Directory with weights and tokenizer.
        gpus: How many engines, each on a GPU of its own; 0 for one on the CPU.

    Attributes:
        fleet: The facade, for refits.
    """

    def __init__(self, checkpoint: Path, gpus: int) -> None:
        self._shards = gpus or 1
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        config = VllmConfig(
            model_name=str(checkpoint),
            max_new_tokens=GREEDY_TOKENS,
            pad_token_id=self._tokenizer.pad_token_id,
            vllm_cfg=VllmSpecificArgs(
                tensor_parallel_size=1,
                gpu_memory_utilization=0.3,
                max_model_len=128,
                precision="bfloat16",
                enforce_eager=True,
                env_vars=engine_environment(on_cpu=not gpus),
            ),
            vllm_kwargs={
                "kv_cache_memory_bytes": 256 * 1024**2,
                # The smallest block on CPU: prompts of more than 32 tokens are served from the
                # prefix cache, so a refit that left it alone would show in the final tokens.
                "block_size": 32,
                "enable_prefix_caching": True,
                "generation_config": "vllm",
                "seed": SEED,
            },
        )
        self._cluster = RayCluster([1] * self._shards, gpus_per_bundle=1 if gpus else 0)
        self.fleet = VllmGeneration(self._cluster, config)

    def sample(self, prompts: list[str], group: int) -> list[list[Rollout]]:
        """Draws ``group`` completions of every prompt at temperature 1, up to the line's end."""
        repeated = [prompt for prompt in prompts for _ in range(group)]
        count = len(repeated)
        asked = {"stop_strings": [["\n"]] * count, "max_new_tokens": [SAMPLED_TOKENS] * count}
        rows = self._rows(self.fleet.generate({**self._batch(repeated), **asked}))
        return [rows[first : first + group] for first in range(0, count, group)]

    def greedy(self, prompts: list[str]) -> list[list[list[int]]]:
        """The most likely next tokens of every prompt, as each engine sees it."""
        # One at a time, so that all engines compute the same batches and tokens can be compared.
        asked = [self._batch([prompt] * self._shards) for prompt in prompts]
        answers = [self.fleet.generate(one, greedy=True) for one in asked]
        return [[row.token_ids for row in self._rows(answer)] for answer in answers]

    def close(self) -> None:
        """Ends the engine. May be called twice."""
        self.fleet.shutdown()
        self._cluster.shutdown()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _batch(self, prompts: list[str]) -> dict[str, torch.Tensor]:
        """Token ids padded on the right, as the facade takes them."""
        found = self._tokenizer(prompts, padding=True, padding_side="right", return_tensors="pt")
        return {
            "input_ids": found["input_ids"],
            "input_lengths": found["attention_mask"].sum(dim=1),
        }

    def _rows(self, answer: Batch) -> list[Rollout]:
        """Takes the facade's result batch apart."""
        ends = answer["unpadded_sequence_lengths"]
        rows = zip(answer["output_ids"], answer["logprobs"], strict=True)
        return [
            Rollout(
                prompt_ids=ids[:start].tolist(),
                token_ids=ids[start:end].tolist(),
                logprobs=logprobs[start:end].tolist(),
                text=self._tokenizer.decode(ids[start:end], skip_special_tokens=True),
                versions={span.weight_version for span in spans},
            )
            for (ids, logprobs), start, end, spans in zip(
                rows,
                ends - answer["generation_lengths"],
                ends,
                answer["weight_version_spans"],
                strict=True,
            )
        ]
