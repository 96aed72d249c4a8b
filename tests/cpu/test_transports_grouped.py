"""Broadcast and reshard between real processes over gloo: trainer grids against engine fleets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import pytest
import torch

from bench.models import config
from tests.harness.dumps import Dump, differences
from tests.harness.megatron_trainers import MegatronTrainers
from tests.harness.shards import ProcessShard
from tests.harness.standin import StandinModel
from tests.harness.standin_models import fused
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.synchronizer import WeightSynchronizer
from weight_sync.transports.registry import GROUPED
from weight_sync.worker.agent import WorkerAgent

pytestmark = pytest.mark.timeout(180)

CFG = config("tiny")
SPEC = TrainerSpec(CFG)
FLEETS = {"tp2-dp2": (2, 2), "dp3": (1, 3)}
# Each stream has several buckets.
BUCKET = 24 << 10
VERSIONS = count(1)


def standin(rank: int, tp: int, weights: int) -> StandinModel:
    return fused(CFG, rank, tp).load(SPEC.full(weights))


def contents(model: StandinModel) -> Dump:
    return {n: repr(t.view(torch.uint8).numpy().tobytes()) for n, t in model.tensors().items()}


class Worker:
    """A stand-in engine worker, inside its process."""

    def __init__(self, rank: int, tp: int) -> None:
        self._model = standin(rank, tp, 0)
        self._agent = WorkerAgent(self._model, rank)

    def rpc(self, request: bytes) -> bytes:
        return self._agent.handle(request)

    def contents(self) -> Dump:
        return contents(self._model)


@dataclass(frozen=True)
class Fleet:
    """Shards of ``tp`` workers each."""

    tp: int
    shards: list[ProcessShard]


@pytest.fixture(scope="module", params=FLEETS.values(), ids=FLEETS.keys())
def fleet(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    tp, dp = request.param
    shards = [ProcessShard(Worker, [(rank, tp) for rank in range(tp)]) for _ in range(dp)]
    yield Fleet(tp, shards)
    for shard in shards:
        shard.close()


@pytest.fixture(scope="module", params=["fsdp-2", "tp-2", "tp-2-pp-2"])
def trainers(request: pytest.FixtureRequest) -> Iterator[Trainers | MegatronTrainers]:
    made: Trainers | MegatronTrainers
    if request.param == "tp-2-pp-2":
        made = MegatronTrainers(CFG, tp=2, pp=2)
    else:
        made = Trainers(TrainerSpec(CFG, request.param.split("-")[0], 2))
    with made as running:
        yield running


@pytest.mark.parametrize("transport", GROUPED)
def test_every_worker_equals_a_fresh_one_that_loaded_the_version(
    trainers: Trainers | MegatronTrainers, fleet: Fleet, transport: str
) -> None:
    synchronizer = WeightSynchronizer(
        trainers.infos, fleet.shards, transport=transport, deadline_s=60, bucket_bytes=BUCKET
    )
    for weights in (1, 2):
        version = next(VERSIONS)
        trainers.publish(version, weights)
        report = synchronizer.sync_weights(version)
        assert report.verified
        assert report.workers == fleet.tp * len(fleet.shards)
        for shard in fleet.shards:
            for rank, have in enumerate(shard.ask("contents")):
                assert differences(have, contents(standin(rank, fleet.tp, weights))) == []
    synchronizer.shutdown()


def test_each_pipeline_stage_has_a_group_of_its_own() -> None:
    with (
        MegatronTrainers(CFG, tp=1, pp=2) as trainers,
        ProcessShard(Worker, [(0, 1)]) as shard,
    ):
        synchronizer = WeightSynchronizer(
            trainers.infos, [shard], transport="reshard", deadline_s=60, bucket_bytes=BUCKET
        )
        trainers.publish(1, 1)
        synchronizer.sync_weights(1)
        plan = synchronizer.plan
        assert plan is not None
        # Both ranks send, and they are in different groups: one rank's bytes cannot come through
        # the other's.
        assert (plan.sender_bytes() > 0).all()
        assert synchronizer._conductor is not None
        assert [g.trainers for g in synchronizer._conductor.groups] == [(0,), (1,)]
        assert differences(shard.ask("contents")[0], contents(standin(0, 1, 1))) == []
        synchronizer.shutdown()
