"""A trainer with fp32 master weights: the declared cast is exact, an undeclared one is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.models import Config, config, random_weights
from tests.harness.engines import Engine
from tests.harness.oracle import Oracle
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.errors import CoverageError
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = pytest.mark.timeout(240)


def master_weights(cfg: Config, version: int) -> dict[str, torch.Tensor]:
    return random_weights(cfg, 50 + version, dtype=torch.float32)


@pytest.fixture(scope="module")
def engine(oracle: Oracle) -> Iterator[Engine]:
    with Engine(oracle.random("tiny", 0)) as engine:
        yield engine.ready()


def spec(ranks: int, cast: dict[str, str]) -> TrainerSpec:
    return TrainerSpec(
        config("tiny"), "fsdp", ranks, dtype=torch.float32, cast=cast, weights=master_weights
    )


def test_declared_cast_rounds_as_torch_does(engine: Engine, oracle: Oracle) -> None:
    cfg = config("tiny")
    with Trainers(spec(2, {"*": "bfloat16"})) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [engine], deadline_s=30)
        trainers.publish(1)
        assert synchronizer.sync_weights(1).verified
    full = master_weights(cfg, 1)
    assert any(not torch.equal(t, t.to(torch.bfloat16).float()) for t in full.values())
    truth = oracle.truth(oracle.checkpoint("masters", cfg, full), 1)
    assert truth.differences(engine) == [[]]


def test_undeclared_cast_is_refused_with_every_name_before_anything_changes(
    engine: Engine,
) -> None:
    before = engine.dump()
    with Trainers(spec(2, {})) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [engine], deadline_s=30)
        trainers.publish(1)
        with pytest.raises(CoverageError) as refused:
            synchronizer.sync_weights(1)
        assert synchronizer.is_stale
    names = {line.split()[0] for line in refused.value.disagreeing}
    assert names == set(master_weights(config("tiny"), 0))
    assert "declare a cast" in refused.value.disagreeing[0]
    assert engine.dump() == before
