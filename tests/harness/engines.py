"""Real vLLM CPU engines in processes of their own: TP 1 in process, TP 2 by external launcher."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tests.harness.dumps import Dump, dump
from tests.harness.processes import Child, ChildGoneError, process_counts
from tests.harness.trainers import free_port
from weight_sync.errors import PeerDeadError

if TYPE_CHECKING:
    from vllm import LLM

PROMPTS = ([3, 4, 5, 6, 7], [9, 8, 7], [11] * 20)
# Variables that must not be needed.
INSECURE = ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_SERVER_DEV_MODE")
"""Greedy tokens of a prompt and the log-probability of each."""
Generated = list[tuple[tuple[int, ...], tuple[float, ...]]]


def start_llm(folder: str, **options: object) -> LLM:
    """A small engine of a checkpoint, as users of this library start one."""
    from vllm import LLM

    from weight_sync.vllm.worker_extension import EXTENSION

    return LLM(
        folder,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        worker_extension_cls=EXTENSION,
        **options,
    )


class EngineRank:
    """One vLLM ``LLM`` inside its process."""

    def __init__(self, folder: str, rank: int, tp: int, port: int, **options: object) -> None:
        if tp > 1:
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(tp),
                LOCAL_WORLD_SIZE=str(tp),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
            )
            options |= {
                "tensor_parallel_size": tp,
                "distributed_executor_backend": "external_launcher",
            }
        self._llm = start_llm(folder, seed=0, **options)

    @property
    def model(self) -> object:
        return self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    def rpc(self, request: bytes) -> list[bytes]:
        return self._llm.collective_rpc("weight_sync_call", args=(request,))

    def invalidate(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def generate(self) -> Generated:
        """Greedy continuations of ``PROMPTS``."""
        from vllm import SamplingParams

        outputs = self._llm.generate(
            [{"prompt_token_ids": p} for p in PROMPTS],
            SamplingParams(
                temperature=0, max_tokens=12, ignore_eos=True, logprobs=1, detokenize=False
            ),
            use_tqdm=False,
        )
        result: Generated = []
        for output in outputs:
            tokens = tuple(output.outputs[0].token_ids)
            scores = zip(output.outputs[0].logprobs, tokens, strict=True)
            result.append((tokens, tuple(step[token].logprob for step, token in scores)))
        return result

    def dump(self) -> Dump:
        """Everything that the weights determine, for bit comparison."""
        return dump(self.model, self._llm.llm_engine.vllm_config)

    def settings(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in INSECURE}

    def counts(self) -> tuple[int, int, int]:
        return process_counts()

    def call(self, function: object, *args: object) -> object:
        """Runs a function of the test on this rank."""
        return function(self, *args)  # type: ignore[operator]


class Engine:
    """One shard of real vLLM; an ``EngineShard`` for the synchronizer.

    Args:
        folder: Checkpoint the engine starts from.
        tp: Number of workers, each a process.
        rank_class: What lives in each process.
    """

    def __init__(
        self, folder: Path, tp: int = 1, rank_class: type[EngineRank] = EngineRank
    ) -> None:
        self.workers = tp
        port = free_port()
        env = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            **dict.fromkeys(INSECURE),
        }
        self.ranks = [
            Child(rank_class, str(folder), rank, tp, port, env=env, start_seconds=120, vllm=True)
            for rank in range(tp)
        ]

    def ready(self) -> Engine:
        """Waits until all workers loaded."""
        for rank in self.ranks:
            rank.ready()
        return self

    def ask(self, method: str, *args: object, seconds: float = 120) -> list[object]:
        """Runs a method on all workers at once and returns their answers."""
        for rank in self.ranks:
            rank.send(method, *args)
        return [rank.receive(seconds) for rank in self.ranks]

    def generate(self) -> Generated:
        """What all workers generated together."""
        return self.ask("generate")[0]  # type: ignore[return-value]

    def dump(self) -> list[Dump]:
        """One dump per worker."""
        return self.ask("dump")  # type: ignore[return-value]

    # --- EngineShard ----------------------------------------------------------------------------

    def call(self, request: bytes) -> list[bytes]:
        try:
            return [reply for (reply,) in self.ask("rpc", request)]  # type: ignore[misc]
        except ChildGoneError as error:
            raise PeerDeadError(f"an engine worker died: {error}", stage="rpc") from error

    def pause(self) -> None:
        """Nothing runs between calls."""

    def invalidate(self) -> None:
        assert all(self.ask("invalidate"))

    def resume(self) -> None:
        """Nothing was paused."""

    def set_version(self, version: int) -> None:
        """Outputs are not looked at by version."""

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
