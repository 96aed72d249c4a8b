"""Real fleets on GPUs: Ray on this machine, fresh engines beside the shards, streams under way."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from generation.answers import values_or_raise
from generation.vllm_generation import VllmGeneration
from tests.harness.engines import EngineRank
from tests.harness.fleets import KV_CACHE_BYTES, WAIT_S, FreshEngine, InFlight, prompts
from tests.harness.processes import Child
from tests.harness.trainers import free_port

if TYPE_CHECKING:
    # Imports vLLM, for which the test's own process has no use.
    from tests.harness.gpu_engines import Bits

START_S = 200.0
# Of every stream before a refit: enough that all are under way, few enough that none is done.
EARLY_TOKENS = 10


@contextmanager
def ray_with_gpus(count: int) -> Iterator[None]:
    """Ray on this machine only, for the time of a block."""
    import ray

    # Ray kills actors when the machine is short of memory, whoever uses it.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=count,
        include_dashboard=False,
        log_to_driver=True,  # vLLM says why an engine does not start in its own output only
        logging_level="ERROR",
        object_store_memory=128 * 1024 * 1024,
    )
    try:
        yield
    finally:
        ray.shutdown()


class FreshGpuEngine(FreshEngine):
    """A fresh engine with one worker, on a small part of the first GPU."""

    # Other kernels for a whole sequence than for its last token, each rounding to bf16.
    NEAR = 0.05

    def __init__(self, folder: Path) -> None:
        make = partial(EngineRank, kv_cache_memory_bytes=KV_CACHE_BYTES, gpu_memory_utilization=0.2)
        env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        port = free_port()
        self._child = Child(make, str(folder), 0, 1, port, env=env, start_seconds=START_S)

    def bits(self) -> Bits:
        """Digests of all its parameters and buffers."""
        return self._child.ask("call", _bits)  # type: ignore[return-value]


def _bits(rank: EngineRank) -> Bits:
    from tests.harness.gpu_engines import bits

    return bits(rank.model)  # type: ignore[arg-type]


def generated(gen: VllmGeneration) -> list[float]:
    """Tokens that each shard has generated so far."""
    answers = values_or_raise(gen.pool.ask(gen.pool.shards, "counters", timeout_s=WAIT_S))
    return [answers[s].get("vllm:generation_tokens", 0.0) for s in gen.pool.shards]


def await_tokens(gen: VllmGeneration, before: list[float], wanted: float) -> None:
    """Waits until every shard has generated so many tokens more than ``before``."""
    deadline = time.monotonic() + WAIT_S
    while min(n - b for n, b in zip(generated(gen), before, strict=True)) < wanted:
        assert time.monotonic() < deadline, "the shards do not generate"


def under_way(gen: VllmGeneration, streams: int) -> InFlight:
    """Starts streams on all shards and waits until each of them generates."""
    before = generated(gen)
    running = InFlight(gen, prompts(streams))
    await_tokens(gen, before, EARLY_TOKENS * streams / gen.dp_size)
    return running
