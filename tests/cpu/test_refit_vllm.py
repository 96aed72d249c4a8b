"""A refit of real vLLM leaves every bit as a fresh engine loaded from disk would have it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from bench.models import config
from tests.harness.engines import Engine
from tests.harness.oracle import Oracle
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = pytest.mark.timeout(240)

# Engines outlive trainers here, and versions never go backwards.
VERSIONS = itertools.count(1)
ENGINES = [("tiny", 1), ("tiny", 2), ("tiny-tied", 1), ("tiny-moe", 1), ("tiny-moe", 2)]
TRAINERS = {
    "plain": ("plain", 1),
    "fsdp-2": ("fsdp", 2),
    "fsdp-3-uneven": ("fsdp", 3),
    "tp-2": ("tp", 2),
    "fsdp-tp-4": ("fsdp_tp", 4),
}


@dataclass(frozen=True)
class Running:
    """An engine that started from version 0 of a model."""

    model: str
    tp: int
    engine: Engine


@pytest.fixture(scope="module", params=ENGINES, ids=lambda p: f"{p[0]}-tp{p[1]}")
def running(request: pytest.FixtureRequest, oracle: Oracle) -> Iterator[Running]:
    model, tp = request.param
    for version in (0, 1):
        oracle.truth(oracle.random(model, version), tp)
    with Engine(oracle.random(model, 0), tp) as engine:
        yield Running(model, tp, engine.ready())


@pytest.mark.parametrize("layout", TRAINERS.values(), ids=TRAINERS.keys())
def test_engine_equals_a_fresh_one_at_v1_and_again_at_v0(
    running: Running, oracle: Oracle, layout: tuple[str, int]
) -> None:
    spec = TrainerSpec(config(running.model), layout=layout[0], ranks=layout[1])
    with Trainers(spec) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [running.engine], deadline_s=30)
        for weights in (1, 0):
            version = next(VERSIONS)
            trainers.publish(version, weights)
            report = synchronizer.sync_weights(version)
            truth = oracle.truth(oracle.random(running.model, weights), running.tp)
            assert report.verified
            assert truth.differences(running.engine) == [[]] * running.tp
            assert running.engine.generate() == truth.generated
        synchronizer.shutdown()


def test_the_two_versions_differ_in_every_trained_tensor(oracle: Oracle) -> None:
    """Guards the test above: equal oracles would prove nothing."""
    old, new = (oracle.truth(oracle.random("tiny", v), 1) for v in (0, 1))
    same = {n for n in old.dumps[0] if old.dumps[0][n] == new.dumps[0][n]}
    packed = {n for n in same if n.endswith(("_proj.weight", "lm_head.weight"))}
    engine_made = {n for n in same if "rotary" in n or "_scale" in n}
    assert same - packed == engine_made
    assert old.generated != new.generated
