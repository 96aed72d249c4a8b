"""Case B03 and limits of a trainer process: rows of nested shards, and too few descriptors."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bench.models import Config, config
from tests.harness.contract import plain_model
from tests.harness.faults import Faults, register_faulty
from tests.harness.local import LocalShard
from tests.harness.standin_models import fused
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.synchronizer import WeightSynchronizer
from weight_sync.transports.ipc import IpcReceiver

pytestmark = pytest.mark.timeout(60)

NAME = "model.embed_tokens.weight"


def numbered_rows(count: int, cfg: Config, version: int) -> dict[str, torch.Tensor]:
    """Row r holds r; version 0 holds -1 everywhere."""
    rows = torch.arange(count, dtype=torch.float32) if version else torch.full((count,), -1.0)
    return {NAME: rows[:, None].expand(count, 6).contiguous()}


@pytest.mark.parametrize("count", [4, 5, 7])
def test_b03_rows_cut_by_tp_and_then_fsdp_arrive_in_order(count: int) -> None:
    spec = TrainerSpec(
        {}, "fsdp_tp", 4, dtype=torch.float32, tp_dim=0, weights=partial(numbered_rows, count)
    )
    model = plain_model({NAME: torch.zeros(count, 6)})
    with Trainers(spec) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [LocalShard([model])], deadline_s=20)
        trainers.publish(1)
        synchronizer.sync_weights(1)
        synchronizer.shutdown()
    live = model.tensors()[f"{NAME}.weight"]
    assert live[:, 0].tolist() == [float(r) for r in range(count)]
    assert live.shape == (count, 6)


def test_a_trainer_that_may_open_few_descriptors_stages_its_weights() -> None:
    cfg = config("tiny")
    spec = TrainerSpec(cfg, "fsdp", 2, descriptors=256)
    faults = Faults()
    register_faulty("counted-ipc", IpcReceiver, {0: faults})
    model = fused(cfg).load(spec.full(0))
    with Trainers(spec) as trainers:
        synchronizer = WeightSynchronizer(
            trainers.infos,
            [LocalShard([model])],
            transport="counted-ipc",
            bucket_bytes=64 << 10,
            deadline_s=20,
        )
        for version, weights in ((1, 1), (2, 0), (3, 1)):
            trainers.publish(version, weights)
            assert synchronizer.sync_weights(version).verified
        synchronizer.shutdown()
    assert "bucket 8" in faults.seen
    want = fused(cfg).load(spec.full(1)).tensors()
    assert all(torch.equal(t, want[n]) for n, t in model.tensors().items())
