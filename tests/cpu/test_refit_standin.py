"""Many trainer and engine layouts against each other, on stand-in engines with fused parameters."""

from __future__ import annotations

import pytest
import torch

from bench.models import Config, config
from tests.harness.local import LocalShard
from tests.harness.standin import StandinModel
from tests.harness.standin_models import fused
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.synchronizer import WeightSynchronizer

TRAINERS = {"fsdp-3-uneven": ("fsdp", 3), "fsdp-tp-4": ("fsdp_tp", 4), "replicas-2": ("plain", 2)}
ENGINES = [(1, 1), (2, 2), (4, 1)]


def shard(cfg: Config, spec: TrainerSpec, tp: int, version: int) -> LocalShard:
    full = spec.full(version)
    return LocalShard([fused(cfg, rank, tp).load(full) for rank in range(tp)])


def different(model: StandinModel, want: StandinModel) -> list[str]:
    have = model.tensors()
    return [n for n, t in want.tensors().items() if not torch.equal(t, have[n])]


@pytest.mark.parametrize("model", ["tiny", "tiny-moe"])
@pytest.mark.parametrize("layout", TRAINERS.values(), ids=TRAINERS.keys())
def test_every_shard_and_worker_equals_a_fresh_one(model: str, layout: tuple[str, int]) -> None:
    cfg = config(model)
    spec = TrainerSpec(cfg, *layout)
    with Trainers(spec) as trainers:
        for first, (tp, dp) in enumerate(ENGINES):
            shards = [shard(cfg, spec, tp, 0) for _ in range(dp)]
            synchronizer = WeightSynchronizer(trainers.infos, shards, deadline_s=20)
            for step, weights in ((1, 1), (2, 0)):
                version = 2 * first + step
                trainers.publish(version, weights)
                report = synchronizer.sync_weights(version)
                assert report.workers == tp * dp
                want = shard(cfg, spec, tp, weights).models
                for one in shards:
                    assert [different(m, w) for m, w in zip(one.models, want, strict=True)] == [
                        []
                    ] * tp
            synchronizer.shutdown()
