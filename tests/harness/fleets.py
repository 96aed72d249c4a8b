"""Real fleets for the facade's tests: Ray on this machine, vLLM on CPU, trainers as processes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import threading
from pathlib import Path
from typing import Any

import torch

from bench.models import Config, config, random_weights, write_checkpoint
from generation.batch import Batch
from generation.capture import VersionSpan
from generation.vllm_generation import VllmGeneration
from tests.harness.engines import EngineRank
from tests.harness.processes import Child
from tests.harness.trainers import Trainers, free_port
from weight_sync.report import RefitReport

WAIT_S = 60.0
MODEL_LEN = 512
# Room for 64 sequences of that length.
KV_CACHE_BYTES = 64 * 1024**2
# Tokens of a sequence that the oracle looks at, one less than its model length.
SCORED = 255
# The weights of every refit that answers are compared after; a fresh engine of them is the oracle.
NEW = 1


def model() -> Config:
    """The tiny model, without an end token: responses have the length they are asked for."""
    return {**config("tiny"), "eos_token_id": None}


def checkpoint(folder: Path, weights: int | None = None, cfg: Config | None = None) -> Path:
    """A checkpoint with a tokenizer whose token ``i`` is the word ``t<i>``.

    Args:
        folder: Where to write it.
        weights: The weights trainers call by this number; None for those no trainer has.
        cfg: Model configuration; None for ``model()``.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    cfg = cfg or model()
    seed = 0 if weights is None else 1000 + weights
    write_checkpoint(cfg, random_weights(cfg, seed), folder)
    vocabulary = {f"t{i}": i for i in range(int(cfg["vocab_size"]))}  # type: ignore[call-overload]
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    # Beside a model's config the model's own tokenizer class would be taken instead.
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    return folder


def settings(folder: Path, engine: dict[str, Any] | None = None, **outer: object) -> dict[str, Any]:
    """Settings of a fleet of the tiny model."""
    return {
        "model_name": str(folder),
        "max_new_tokens": 12,
        "colocated": False,
        "refit_transport": "ipc",
        **outer,
        "vllm_kwargs": {
            "max_num_seqs": 64,
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "tokenizer": str(folder / "tokenizer"),
            **outer.get("vllm_kwargs", {}),  # type: ignore[dict-item]
        },
        "vllm_cfg": {
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.3,
            "max_model_len": MODEL_LEN,
            "precision": "bfloat16",
            "enforce_eager": True,
            "env_vars": {"VLLM_LOGGING_LEVEL": "ERROR"},
            **(engine or {}),
        },
    }


@dataclasses.dataclass
class Fleet:
    """A running fleet with the trainer it is refitted from.

    Attributes:
        gen: The facade.
        trainers: One trainer rank.
        version: Newest version it was refitted to.
    """

    gen: VllmGeneration
    trainers: Trainers
    version: int = 0

    def publish(self, weights: int = NEW) -> int:
        """The trainer publishes the next version."""
        self.version += 1
        self.trainers.publish(self.version, weights)
        return self.version

    def refit(self, weights: int = NEW, transport: str = "ipc") -> int:
        """Refits all participants and returns the version."""
        return self.reported(weights, transport).version

    def reported(self, weights: int = NEW, transport: str = "ipc") -> RefitReport:
        """Refits all participants and returns the report."""
        calls = {
            "ipc": self.gen.update_weights_via_ipc_zmq,
            "broadcast": self.gen.update_weights_from_collective,
            "reshard": self.gen.nccl_reshard_refit,
        }
        version = self.publish(weights)
        (future,) = calls[transport](version=version)
        report = future.result(WAIT_S)
        assert report.verified
        assert (report.version, report.transport) == (version, transport)
        return report


# --- requests -----------------------------------------------------------------------------------


def batch(*prompts: list[int], **columns: object) -> Batch:
    """A right-padded batch of prompts."""
    width = max((len(p) for p in prompts), default=0)
    rows = [p + [0] * (width - len(p)) for p in prompts]
    ids = torch.tensor(rows, dtype=torch.int64).reshape(len(prompts), width)
    lengths = torch.tensor([len(p) for p in prompts], dtype=torch.int64)
    return Batch({"input_ids": ids, "input_lengths": lengths, **columns})


@dataclasses.dataclass(frozen=True)
class Said:
    """One answer, taken apart."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    leader: int


def said(prompt: list[int], answer: Batch, row: int = 0) -> Said:
    """One row of a result batch."""
    start, end = len(prompt), int(answer["unpadded_sequence_lengths"][row])
    return Said(
        prompt,
        answer["output_ids"][row, start:end].tolist(),
        answer["logprobs"][row, start:end].tolist(),
        answer["weight_version_spans"][row],
        answer["gen_leader_worker_idx"][row] if "gen_leader_worker_idx" in answer else -1,
    )


async def ask_async(gen: VllmGeneration, prompt: list[int], greedy: bool = True) -> Said:
    """One request through the async facade."""
    found = [pair async for pair in gen.generate_async(batch(prompt), greedy)]
    ((index, answer),) = found
    assert index == 0
    return said(prompt, answer)


def ask(gen: VllmGeneration, prompt: list[int]) -> Said:
    """One request, waited for."""
    return asyncio.run(asyncio.wait_for(ask_async(gen, prompt), WAIT_S))


class InFlight:
    """Many requests at once, on a thread of their own; ends when all are answered or failed."""

    def __init__(self, gen: VllmGeneration, prompts: list[list[int]]) -> None:
        self._gen, self._prompts = gen, prompts
        self.outcomes: list[Said | BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        async def everything() -> list[Said | BaseException]:
            calls = [ask_async(self._gen, prompt) for prompt in self._prompts]
            return await asyncio.gather(*calls, return_exceptions=True)

        self.outcomes = asyncio.run(everything())

    def wait(self) -> list[Said | BaseException]:
        """All outcomes, in the order of the prompts."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "requests hang"
        return self.outcomes

    def answers(self) -> list[Said]:
        """All answers; raises the first failure."""
        for outcome in self.wait():
            if isinstance(outcome, BaseException):
                raise outcome
        return self.outcomes  # type: ignore[return-value]


def prompts(count: int, length: int = 8) -> list[list[int]]:
    """Distinct prompts."""
    return [[(7 * i + 3 * k + i * k) % 97 + 3 for k in range(length)] for i in range(count)]


# --- oracle -------------------------------------------------------------------------------------


def _score(rank: EngineRank, sequences: list[list[int]]) -> list[list[tuple[float, float]]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    outputs = rank._llm.generate(
        [{"prompt_token_ids": tokens} for tokens in sequences], params, use_tqdm=False
    )
    scores = []
    for tokens, output in zip(sequences, outputs, strict=True):
        steps = list(zip(tokens, output.prompt_logprobs, strict=True))[1:]
        best = [max(e.logprob for e in step.values()) for _, step in steps]
        scores.append(
            [(step[token].logprob, top) for (token, step), top in zip(steps, best, strict=True)]
        )
    return scores


class FreshEngine:
    """An engine of its own, loaded from disk, that says what it would have generated."""

    # bf16 sums in another order: what the same engine gives for one prompt in other batches.
    NEAR = 0.03

    def __init__(self, folder: Path) -> None:
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._child = Child(EngineRank, str(folder), 0, 1, free_port(), env=env, start_seconds=120)

    def off(self, answers: list[Said], start: int | list[int] = 0) -> list[str]:
        """Tokens that this engine, given the same prefix, would not have generated greedily, or not
        with that log-probability.

        Args:
            answers: What another engine generated.
            start: First token to compare, of all answers or of each.
        """
        starts = start if isinstance(start, list) else [start] * len(answers)
        sequences = [a.prompt + a.tokens for a in answers]
        wrong = []
        scores = self._child.ask("call", _score, [s[:SCORED] for s in sequences], seconds=WAIT_S)
        for n, (answer, first, steps) in enumerate(zip(answers, starts, scores, strict=True)):
            own = steps[len(answer.prompt) - 1 :]
            assert first < len(own), "no token of this answer would be compared"
            for at in range(first, len(own)):
                logprob, best = own[at]
                given = answer.logprobs[at]
                if best - logprob > self.NEAR or abs(given - logprob) > self.NEAR:
                    wrong.append(f"{n}[{at}]: {given:.3f} against {logprob:.3f}, best {best:.3f}")
        return wrong

    def close(self) -> None:
        self._child.close()


def kill_process(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, 9)
