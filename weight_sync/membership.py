"""Who takes part in refits: immutable, numbered by epoch, ranks compacted.

Trainer ranks come first, then the workers of each present shard in shard order, so the ranks of a
group are always dense. Leaving and rejoining are the same operation: state which shards are absent.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import msgspec

from weight_sync.errors import MembershipError, NoSurvivingShardsError

# How many epoch numbers may be skipped when somebody else's are overtaken.
_EPOCH_GAP = 1 << 16


class Membership(msgspec.Struct, frozen=True):
    """The participants of one epoch.

    Attributes:
        epoch: Grows by one with every change.
        trainer_world_size: Number of trainer ranks; they never leave.
        shards: Present engine shards, sorted.
        workers_per_shard: ``tp * pp`` of the engine.
    """

    epoch: int
    trainer_world_size: int
    shards: tuple[int, ...]
    workers_per_shard: int

    def __post_init__(self) -> None:
        if self.trainer_world_size < 1 or self.workers_per_shard < 1:
            raise MembershipError(
                "trainer_world_size and workers_per_shard must be at least 1, not "
                f"{self.trainer_world_size} and {self.workers_per_shard}"
            )
        if not self.shards:
            raise NoSurvivingShardsError(
                f"no engine shard is left in epoch {self.epoch}; restart a shard, then refit"
            )
        if tuple(sorted(set(self.shards))) != self.shards or self.shards[0] < 0:
            raise MembershipError(f"shards must be sorted, distinct and >= 0, not {self.shards}")

    @property
    def workers(self) -> int:
        """Number of engine workers that take part."""
        return len(self.shards) * self.workers_per_shard

    @property
    def world_size(self) -> int:
        """Number of ranks of a group over all participants."""
        return self.trainer_world_size + self.workers

    def worker_index(self, shard: int, worker: int) -> int:
        """Dense index of a worker among the engine workers.

        Raises:
            MembershipError: If the shard is absent or the worker does not exist.
        """
        if shard not in self.shards:
            raise MembershipError(f"shard {shard} is absent in epoch {self.epoch}")
        if not 0 <= worker < self.workers_per_shard:
            raise MembershipError(
                f"worker {worker} does not exist; a shard has {self.workers_per_shard}"
            )
        return self.shards.index(shard) * self.workers_per_shard + worker

    def group_rank(self, shard: int, worker: int) -> int:
        """Rank of a worker in a group over all participants: trainers first."""
        return self.trainer_world_size + self.worker_index(shard, worker)

    def prefix(self, shard: int) -> int:
        """Compacted index of the shard's first worker, counted without trainers."""
        return self.worker_index(shard, 0)

    def place(self, worker_index: int) -> tuple[int, int]:
        """Inverse of :meth:`worker_index`: (shard, worker)."""
        position, worker = divmod(worker_index, self.workers_per_shard)
        return self.shards[position], worker

    def describe(self, worker_index: int) -> str:
        """How errors name a worker."""
        shard, worker = self.place(worker_index)
        return f"shard {shard} worker {worker}"

    def same_participants(self, other: Membership | None) -> bool:
        """True if only the epoch differs."""
        return other is not None and msgspec.structs.replace(self, epoch=other.epoch) == other


def plan_membership(
    *,
    epoch: int,
    trainer_world_size: int,
    dp_size: int,
    total_workers: int,
    absent: Iterable[int] = (),
) -> Membership:
    """The membership a fleet should have when the shards in ``absent`` do not take part.

    Args:
        epoch: Number of the new epoch.
        trainer_world_size: Trainer ranks.
        dp_size: Engine shards the fleet was built with.
        total_workers: Engine workers the fleet was built with.
        absent: Shards that are dead, restarting or retired; order and repeats do not matter.

    Raises:
        MembershipError: If the fleet is uneven or a shard number does not exist.
        NoSurvivingShardsError: If every shard is absent.
    """
    if dp_size < 1:
        raise MembershipError(f"dp_size must be at least 1, not {dp_size}")
    if total_workers % dp_size:
        raise MembershipError(
            f"{total_workers} workers do not divide over {dp_size} shards; every shard must have "
            "the same tp * pp"
        )
    gone = set(absent)
    unknown = sorted(s for s in gone if not 0 <= s < dp_size)
    if unknown:
        raise MembershipError(f"shards {unknown} do not exist; the fleet has {dp_size}")
    shards = tuple(s for s in range(dp_size) if s not in gone)
    if not shards:
        raise NoSurvivingShardsError(
            f"all {dp_size} engine shards are absent; restart at least one, then refit"
        )
    return Membership(epoch, trainer_world_size, shards, total_workers // dp_size)


class MembershipTracker:
    """Compares the desired membership with the one that groups and plan were built for."""

    def __init__(self, trainer_world_size: int, dp_size: int, total_workers: int) -> None:
        self._trainers = trainer_world_size
        self._dp = dp_size
        self._total = total_workers
        self._epoch = 0
        self._built: Membership | None = None

    @property
    def built(self) -> Membership | None:
        """What is built now; None before the first build and after an abort."""
        return self._built

    def desired(self, absent: Iterable[int] = ()) -> Membership:
        """The membership that should be built, under the next epoch number."""
        return plan_membership(
            epoch=self._epoch + 1,
            trainer_world_size=self._trainers,
            dp_size=self._dp,
            total_workers=self._total,
            absent=absent,
        )

    def needs_build(self, absent: Iterable[int] = ()) -> bool:
        """True if groups and plan must be rebuilt, also when nobody left but state is unknown."""
        return not self.desired(absent).same_participants(self._built)

    @property
    def epoch(self) -> int:
        """Newest epoch number that was taken."""
        return self._epoch

    def overtake(self, epoch: int) -> None:
        """Makes the next epoch newer than one that participants have seen of somebody else.

        Whoever built that one may be asleep in the middle of the next, and must not be able to
        speak for ours when it wakes: so ours is not simply the next number.
        """
        if epoch > self._epoch:
            self._epoch = epoch + 1 + secrets.randbelow(_EPOCH_GAP)

    def begin_build(self, absent: Iterable[int] = ()) -> Membership:
        """Takes the next epoch number; nothing counts as built until :meth:`finish_build`."""
        membership = self.desired(absent)
        self._epoch = membership.epoch
        self._built = None
        return membership

    def finish_build(self, membership: Membership) -> None:
        """Records that all participants hold groups and plan of ``membership``."""
        if membership.epoch != self._epoch:
            raise MembershipError(
                f"epoch {membership.epoch} was overtaken by {self._epoch}; build again"
            )
        self._built = membership

    def invalidate(self) -> None:
        """After an abort the built state is unknown, even if nobody left."""
        self._built = None
