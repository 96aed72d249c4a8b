"""Real vLLM workers that fail or die in the middle of a refit, and stock settings."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from bench.models import config
from tests.harness.engines import INSECURE, Engine, EngineRank
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
        from vllm import LLM

        from weight_sync.engine import LocalLLM
        from weight_sync.vllm.worker_extension import EXTENSION

        self._llm = LLM(
            folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            dtype="bfloat16",
            max_model_len=256,
            max_num_seqs=8,
            tensor_parallel_size=2,
            worker_extension_cls=EXTENSION,
        )
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

    def stop(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def stock_engine(folder: Path) -> Child:
    unset = (*INSECURE, "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_WORKER_MULTIPROC_METHOD")
    env = {"VLLM_LOGGING_LEVEL": "ERROR", **dict.fromkeys(unset)}
    return Child(StockEngine, str(folder), env=env, start_seconds=150, daemon=False, vllm=True)


def test_stock_settings_suffice(oracle: Oracle) -> None:
    child = stock_engine(oracle.random("tiny", 0))
    try:
        with Trainers(TrainerSpec(config("tiny"), "fsdp", 2)) as trainers:
            child.ready()
            assert child.ask("settings") == dict.fromkeys(INSECURE)
            trainers.publish(1)
            assert child.ask("refit", trainers.infos, 1, seconds=90) == (True, 2)
            truth = oracle.truth(oracle.random("tiny", 1), 2)
            assert child.ask("tokens") == [tokens for tokens, _ in truth.generated]
            child.ask("stop")
    finally:
        child.close()
