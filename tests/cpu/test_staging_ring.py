"""What cannot be mapped is staged bucket by bucket, through two slots, with exact values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.models import config
from tests.harness.local import LocalShard
from tests.harness.standin import StandinModel
from tests.harness.standin_models import fused
from tests.harness.trainers import Rank, Trainers, TrainerSpec
from weight_sync.errors import DeadlineError
from weight_sync.synchronizer import WeightSynchronizer

CONFIG = config("tiny")
# Far fewer descriptors than storages, so that nothing is exported.
SPEC = TrainerSpec(CONFIG, "plain", 2, descriptors=300)
# The largest tensors are bigger than a bucket, and dozens of buckets are needed.
BUCKET = 16 << 10


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with Trainers(SPEC) as trainers:
        yield trainers


def shard(tp: int, version: int) -> LocalShard:
    full = SPEC.full(version)
    return LocalShard([fused(CONFIG, rank, tp).load(full) for rank in range(tp)])


def different(have: StandinModel, want: StandinModel) -> list[str]:
    mine = have.tensors()
    return [n for n, t in want.tensors().items() if not torch.equal(t, mine[n])]


def slots(rank: Rank) -> list[list[int]]:
    """Bytes of both slots of every ring of a rank."""
    rings = rank.endpoint._rings.values()
    return [[memory.numel() for memory in ring._packer.slots] for ring in rings]


def pack_slowly(rank: Rank, seconds: float) -> None:
    """Makes every bucket of this rank take a while."""
    import time

    from weight_sync.trainer.packer import Packer

    usual = Packer.pack

    def pack(packer: Packer, number: int) -> torch.Tensor:
        time.sleep(seconds)
        return usual(packer, number)

    Packer.pack = pack  # type: ignore[method-assign]


def test_staged_weights_arrive_exactly_and_again(trainers: Trainers) -> None:
    one = shard(2, 0)
    synchronizer = WeightSynchronizer(trainers.infos, [one], deadline_s=20, bucket_bytes=BUCKET)
    for version, weights in ((1, 1), (2, 0), (3, 2)):
        trainers.publish(version, weights)
        assert synchronizer.sync_weights(version).verified
        want = shard(2, weights).models
        assert [different(m, w) for m, w in zip(one.models, want, strict=True)] == [[], []]
    synchronizer.shutdown()
    largest = max(t.numel() * t.element_size() for t in SPEC.full(0).values())
    held = [slot for rings in trainers.ask("call", slots) for slot in rings]
    assert held
    for pair in held:
        assert len(pair) == 2
        assert sum(pair) <= 2 * BUCKET + largest


def test_a_slow_stream_ends_at_the_deadline_and_the_next_refit_works() -> None:
    with Trainers(SPEC) as trainers:
        one = shard(1, 0)
        synchronizer = WeightSynchronizer(trainers.infos, [one], deadline_s=20, bucket_bytes=BUCKET)
        trainers.publish(1)
        synchronizer.init_communicator()
        trainers.ranks[0].ask("call", pack_slowly, 0.1)
        with pytest.raises(DeadlineError):
            synchronizer.sync_weights(1, deadline_s=1)
        assert synchronizer.is_stale
        trainers.publish(2, 1)
        synchronizer.init_communicator()
        assert synchronizer.sync_weights(2, deadline_s=20).verified
        assert different(one.models[0], shard(1, 1).models[0]) == []
