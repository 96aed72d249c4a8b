"""Broadcast and reshard into real vLLM: two workers, FSDP2 trainers, equal to a fresh engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.models import config
from tests.harness.engines import Engine
from tests.harness.oracle import Oracle
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.synchronizer import WeightSynchronizer
from weight_sync.transports.registry import GROUPED

pytestmark = pytest.mark.timeout(240)

MODEL, TP = "tiny-moe", 2


@pytest.fixture(scope="module")
def engine(oracle: Oracle) -> Iterator[Engine]:
    for version in (0, 1):
        oracle.truth(oracle.random(MODEL, version), TP)
    with Engine(oracle.random(MODEL, 0), TP) as running:
        yield running.ready()


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers(TrainerSpec(config(MODEL), "fsdp", 2)) as running:
        yield running


@pytest.mark.parametrize("stage_bytes", [None, 400_000], ids=["staged", "rounds"])
@pytest.mark.parametrize("transport", GROUPED)
def test_engine_equals_a_fresh_one_at_v1_and_again_at_v0(
    engine: Engine, trainers: Trainers, oracle: Oracle, transport: str, stage_bytes: int | None
) -> None:
    synchronizer = WeightSynchronizer(
        trainers.infos,
        [engine],
        transport=transport,
        deadline_s=60,
        bucket_bytes=20_000,
        stage_bytes=stage_bytes,
    )
    first = 2 * (2 * GROUPED.index(transport) + (stage_bytes is not None))
    for version, weights in ((first + 1, 1), (first + 2, 0)):
        trainers.publish(version, weights)
        report = synchronizer.sync_weights(version)
        truth = oracle.truth(oracle.random(MODEL, weights), TP)
        assert report.verified
        assert truth.differences(engine) == [[]] * TP
        assert engine.generate() == truth.generated
    assert synchronizer._conductor is not None
    assert synchronizer._conductor.later_rounds == (stage_bytes is not None)
    synchronizer.shutdown()
