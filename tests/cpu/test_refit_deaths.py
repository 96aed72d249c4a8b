"""Case B41 with real processes: whoever dies, the others get a named error in time and go on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.models import config
from tests.harness.processes import ChildError
from tests.harness.shards import ProcessShard
from tests.harness.standin_models import fused
from tests.harness.standin_process import FAULTY, dump, standin_shard
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.errors import PeerDeadError, RefitError
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = pytest.mark.timeout(90)

TIMEOUT = 2.0
CFG = config("tiny")
SPEC = TrainerSpec(CFG, "fsdp", 2)


@pytest.fixture
def sockets(short_path: Path) -> Path:
    """Where the trainers' sockets are."""
    return short_path


@pytest.fixture
def trainers(sockets: Path) -> Iterator[Trainers]:
    with Trainers(SPEC, env={"WEIGHT_SYNC_SOCKET_DIR": str(sockets)}) as started:
        yield started


@pytest.fixture
def shard() -> Iterator[ProcessShard]:
    with standin_shard(fused, CFG, SPEC.full(0), tp=2) as started:
        yield started


def connected(trainers: Trainers, shard: ProcessShard) -> WeightSynchronizer:
    """A synchronizer after its first good refit."""
    synchronizer = WeightSynchronizer(trainers.infos, [shard], transport=FAULTY, deadline_s=30)
    trainers.publish(1)
    synchronizer.sync_weights(1)
    return synchronizer


def equals_version(shard: ProcessShard, version: int) -> bool:
    full = SPEC.full(version)
    return shard.ask("dump") == [dump(fused(CFG, rank, 2).load(full)) for rank in range(2)]


@pytest.mark.parametrize("stage", ["bucket 0", "last bucket", "commit"])
def test_b41_killed_worker_is_named_and_every_trainer_rank_is_released(
    trainers: Trainers, shard: ProcessShard, stage: str
) -> None:
    synchronizer = connected(trainers, shard)
    shard.ranks[1].ask("plan_fault", {stage: ("kill",)})
    trainers.publish(2, 0)
    trainers.send("wait", 2, 2 * TIMEOUT)
    start = time.monotonic()
    with pytest.raises(PeerDeadError, match="died"):
        synchronizer.sync_weights(2, deadline_s=TIMEOUT)
    assert time.monotonic() - start < 2 * TIMEOUT
    for rank in trainers.ranks:
        with pytest.raises(ChildError, match="died") as released:
            rank.receive(2 * TIMEOUT)
        assert released.value.kind == "RefitError"
    assert synchronizer.is_stale
    assert synchronizer.shard_versions == (-1,)


def test_b41_a_replaced_worker_joins_the_next_refit(
    trainers: Trainers, shard: ProcessShard
) -> None:
    synchronizer = connected(trainers, shard)
    shard.ranks[1].ask("plan_fault", {"bucket 0": ("kill",)})
    trainers.publish(2, 0)
    with pytest.raises(RefitError):
        synchronizer.sync_weights(2)
    # The survivor's answer to the failed request was never taken: it is replaced as well.
    shard.restart(0)
    shard.restart(1)
    trainers.publish(3, 1)
    assert synchronizer.sync_weights(3).verified
    assert not synchronizer.is_stale
    assert equals_version(shard, 1)


def test_b41_nothing_is_left_in_the_file_system_after_a_crash_of_the_peer(
    trainers: Trainers, shard: ProcessShard, sockets: Path
) -> None:
    synchronizer = connected(trainers, shard)
    pids = [str(rank.pid) for rank in trainers.ranks]
    assert len(list(sockets.iterdir())) == 2
    shard.ranks[0].kill()
    trainers.publish(2, 0)
    with pytest.raises(RefitError):
        synchronizer.sync_weights(2, deadline_s=TIMEOUT)
    trainers.ask("stop")
    assert list(sockets.iterdir()) == []
    assert [n for n in os.listdir("/dev/shm") if any(pid in n for pid in pids)] == []


def test_b41_killed_trainer_rank_is_named(trainers: Trainers, shard: ProcessShard) -> None:
    synchronizer = connected(trainers, shard)
    trainers.publish(2, 0)
    trainers.ranks[1].kill()
    start = time.monotonic()
    with pytest.raises(PeerDeadError, match="trainer 1") as failed:
        synchronizer.sync_weights(2, deadline_s=TIMEOUT)
    assert time.monotonic() - start < 2 * TIMEOUT
    assert failed.value.ranks == ("trainer 1",)
    # It died before the first byte: the engine still serves version 1, whole.
    assert not synchronizer.is_stale
    assert equals_version(shard, 1)


def test_b41_trainer_killed_while_a_worker_installs_is_named_by_the_worker(
    trainers: Trainers, shard: ProcessShard
) -> None:
    synchronizer = connected(trainers, shard)
    shard.ranks[0].ask("plan_fault", {"last bucket": ("sleep", 1.0)})
    trainers.publish(2, 0)
    trainers.ranks[1].send("call", die_on_next_digest)
    trainers.ranks[1].receive()
    with pytest.raises(RefitError, match="trainer 1"):
        synchronizer.sync_weights(2, deadline_s=4.0)
    assert not trainers.ranks[1].process.is_alive()


def die_on_next_digest(rank: object) -> None:
    """The trainer rank dies when a worker asks for its digests."""
    import signal

    def die(*args: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    rank.endpoint._class_digests = die  # type: ignore[attr-defined]
