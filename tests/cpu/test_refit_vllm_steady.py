"""What a refit of real vLLM costs beyond its bytes: nothing grows, nothing is gathered."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from bench.models import config
from tests.harness.engines import Engine
from tests.harness.no_gather import GatheredError, forbid_gathers, gather_one
from tests.harness.oracle import Oracle
from tests.harness.processes import ChildError, process_counts
from tests.harness.trainers import Rank, Trainers, TrainerSpec
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = pytest.mark.timeout(240)

# Engines outlive trainers here, and versions never go backwards.
VERSIONS = itertools.count(1)
# Warm-up: kernels are loaded, caches of compiled copies are filled.
WARM, MEASURED = 3, 10
# Resident memory moves by a few pages; a leak of one model per refit would be ten times 0.5 MB.
GROWTH_KIB = 2048


@pytest.fixture(scope="module")
def engine(oracle: Oracle) -> Iterator[Engine]:
    with Engine(oracle.random("tiny", 0)) as engine:
        yield engine.ready()


def test_ten_refits_grow_neither_memory_nor_descriptors_nor_threads(engine: Engine) -> None:
    with Trainers(TrainerSpec(config("tiny"), "fsdp", 2)) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [engine], deadline_s=30)
        counts = []
        for number in range(1, WARM + MEASURED + 1):
            version = next(VERSIONS)
            trainers.publish(version, number % 2)
            synchronizer.sync_weights(version)
            if number in (WARM, WARM + MEASURED):
                counts.append([*engine.ask("counts"), *trainers.ask("counts"), process_counts()])
        for before, after in zip(*counts, strict=True):
            assert after[:2] == before[:2]
            assert after[2] - before[2] < GROWTH_KIB


@pytest.mark.parametrize(("layout", "ranks"), [("fsdp", 2), ("tp", 2), ("fsdp_tp", 4)])
def test_the_trainer_never_gathers(engine: Engine, oracle: Oracle, layout: str, ranks: int) -> None:
    with Trainers(TrainerSpec(config("tiny"), layout, ranks)) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [engine], deadline_s=30)
        trainers.ask("load", 1)
        trainers.ask("call", forbid_gathers)
        for version in (next(VERSIONS), next(VERSIONS)):
            trainers.ask("call", publish_as_it_is, version)
            synchronizer.sync_weights(version)
    assert oracle.truth(oracle.random("tiny", 1), 1).differences(engine) == [[]]


def test_the_guard_against_gathers_sees_one() -> None:
    with Trainers(TrainerSpec(config("tiny"), "fsdp", 2)) as trainers:
        trainers.ask("call", forbid_gathers)
        with pytest.raises(ChildError) as raised:
            trainers.ask("call", gather_one)
        assert raised.value.kind == GatheredError.__name__


def publish_as_it_is(rank: Rank, version: int) -> None:
    rank.endpoint.publish(version)
