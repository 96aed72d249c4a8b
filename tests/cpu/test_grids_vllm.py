"""Pipeline and expert parallel trainers into real vLLM of two workers, equal to a fresh one."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from bench.grids import trainer_grid
from bench.models import config
from bench.options import TRANSPORTS
from bench.trainer_process import BenchTrainer, TrainerProcesses
from bench.values import whole
from tests.harness.engines import Engine
from tests.harness.oracle import Oracle
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MODEL, TP = "tiny-moe", 2
CFG = config(MODEL)
VERSIONS = count(1)


def checkpoint(oracle: Oracle, values: int) -> Path:
    return oracle.checkpoint(f"{MODEL}-values-{values}", CFG, whole(CFG, values))


@pytest.fixture(scope="module")
def engine(oracle: Oracle) -> Iterator[Engine]:
    for values in (0, 1):
        oracle.truth(checkpoint(oracle, values), TP)
    with Engine(checkpoint(oracle, 0), TP) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def trainers() -> Iterator[TrainerProcesses]:
    grid = trainer_grid("pp=2,ep=2", CFG)
    with TrainerProcesses(BenchTrainer(CFG, ("cpu",) * grid.ranks, "cpu", grid)) as running:
        yield running


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engine_equals_a_fresh_one_at_v1_and_again_at_v0(
    engine: Engine, trainers: TrainerProcesses, oracle: Oracle, transport: str
) -> None:
    synchronizer = WeightSynchronizer(
        trainers.infos, [engine], transport=transport, deadline_s=60, bucket_bytes=20_000
    )
    for values in (1, 0):
        version = next(VERSIONS)
        trainers.ask("publish", version, values)
        report = synchronizer.sync_weights(version)
        truth = oracle.truth(checkpoint(oracle, values), TP)
        assert report.verified
        assert truth.differences(engine) == [[]] * TP
        assert engine.generate() == truth.generated
    synchronizer.shutdown()
