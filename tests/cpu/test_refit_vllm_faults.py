"""Real vLLM workers that fail or die in the middle of a refit, and stock settings."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from bench.models import config
from tests.harness.engines import INSECURE, Engine, EngineRank, start_llm
from tests.harness.oracle import Oracle
from tests.harness.processes import Child
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.errors import RefitError
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = pytest.mark.timeout(300)

DEADLINE = 10.0


def die_at_unit(rank: EngineRank, number: int) -> None:
    """The worker kills itself when it finishes its ``number``-th processed module."""
    _at_unit(number, lambda: os.kill(os.getpid(), signal.SIGKILL))


def fail_at_unit(rank: EngineRank, number: int) -> None:
    """The worker raises once when it finishes its ``number``-th processed module."""

    def fail() -> None:
        raise RuntimeError("kernel said no")

    _at_unit(number, fail)


def _at_unit(number: int, action: object) -> None:
    from weight_sync.vllm.process import VllmUnitInstall

    usual, seen = VllmUnitInstall.finish, [0]

    def finish(unit: VllmUnitInstall) -> None:
        seen[0] += 1
        if seen[0] == number:
            action()  # type: ignore[operator]
        usual(unit)

    VllmUnitInstall.finish = finish  # type: ignore[method-assign]


def test_worker_killed_in_the_middle_is_a_named_error_and_the_engine_stays_stale(
    oracle: Oracle,
) -> None:
    spec = TrainerSpec(config("tiny"), "fsdp", 2)
    with Engine(oracle.random("tiny", 0), 2) as engine, Trainers(spec) as trainers:
        engine.ready()
        synchronizer = WeightSynchronizer(trainers.infos, [engine], deadline_s=60)
        trainers.publish(1)
        synchronizer.sync_weights(1)
        assert not synchronizer.is_stale
        engine.ranks[1].ask("call", die_at_unit, 4)
        trainers.publish(2, 0)
        start = time.monotonic()
        with pytest.raises(RefitError) as failed:
            synchronizer.sync_weights(2, deadline_s=DEADLINE)
        assert time.monotonic() - start < DEADLINE
        assert not engine.ranks[1].process.is_alive()
        assert "died" in str(failed.value)
        assert synchronizer.is_stale
        assert synchronizer.version == 1
        assert synchronizer.shard_versions == (-1,)


def test_worker_that_raises_in_the_middle_recovers_with_the_next_full_refit(
    oracle: Oracle,
) -> None:
    with (
        Engine(oracle.random("tiny", 0)) as engine,
        Trainers(TrainerSpec(config("tiny"))) as trainers,
    ):
        engine.ready()
        synchronizer = WeightSynchronizer(trainers.infos, [engine], deadline_s=60)
        engine.ranks[0].ask("call", fail_at_unit, 4)
        trainers.publish(1)
        with pytest.raises(RefitError, match="kernel said no") as failed:
            synchronizer.sync_weights(1)
        assert failed.value.ranks == ("shard 0 worker 0",)
        assert synchronizer.is_stale
        trainers.publish(2, 1)
        assert synchronizer.sync_weights(2).verified
        assert not synchronizer.is_stale
        truth = oracle.truth(oracle.random("tiny", 1), 1)
        assert truth.differences(engine) == [[]]
        assert engine.generate() == truth.generated


class StockEngine:
    """vLLM as a user starts it: engine core and workers in processes of their own."""

    def __init__(self, folder: str) -> None:
        from weight_sync.engine import LocalLLM

        self._llm = start_llm(folder, tensor_parallel_size=2)
        self._shard = LocalLLM(self._llm)

    def refit(self, infos: list, version: int) -> tuple[bool, int]:
        synchronizer = WeightSynchronizer(infos, [self._shard], deadline_s=60)
        report = synchronizer.sync_weights(version)
        synchronizer.shutdown()
        return report.verified, report.workers

    def tokens(self) -> list[tuple[int, ...]]:
        from vllm import SamplingParams

        from tests.harness.engines import PROMPTS

        outputs = self._llm.generate(
            [{"prompt_token_ids": p} for p in PROMPTS],
            SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return [tuple(o.outputs[0].token_ids) for o in outputs]

    def settings(self) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in INSECURE}

    def caches_apart(self) -> bool:
        return self._shard.caches_apart

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def stock(oracle: Oracle) -> Iterator[Child]:
    """An engine that started from version 0, with the settings of a user who set none."""
    unset = (*INSECURE, "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD")
    env = {"VLLM_LOGGING_LEVEL": "ERROR", **dict.fromkeys(unset)}
    folder = str(oracle.random("tiny", 0))
    child = Child(StockEngine, folder, env=env, start_seconds=150, daemon=False, vllm=True)
    try:
        yield child.ready()
        child.ask("stop")
    finally:
        child.close()


def test_stock_settings_suffice(oracle: Oracle, stock: Child) -> None:
    with Trainers(TrainerSpec(config("tiny"), "fsdp", 2)) as trainers:
        assert stock.ask("settings") == dict.fromkeys(INSECURE)
        trainers.publish(1)
        assert stock.ask("refit", trainers.infos, 1, seconds=90) == (True, 2)
        truth = oracle.truth(oracle.random("tiny", 1), 2)
        assert stock.ask("tokens") == [tokens for tokens, _ in truth.generated]


def test_an_engine_in_a_process_of_its_own_gets_one_call_at_a_time(stock: Child) -> None:
    assert stock.ask("caches_apart") is False
