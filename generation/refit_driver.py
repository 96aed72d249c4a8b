"""Drives the weight synchronizer for a fleet: one refit at a time, over the shards that are there.

The synchronizer moves and proves the bytes. This decides who takes part, rebuilds plan and groups
when that changed, and tells the roster how every single shard came out.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from generation.errors import FleetStateError, NoHealthyShardsError
from generation.limits import Limits
from generation.ray_shard import RayShard
from generation.roster import Roster
from generation.worker_pool import WorkerPool
from weight_sync.errors import DeadlineError, EngineStateError, PeerDeadError, WeightSyncError
from weight_sync.membership import Membership
from weight_sync.messages import TrainerEndpointInfo
from weight_sync.report import RefitReport
from weight_sync.synchronizer import WeightSynchronizer

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RefitDriver:
    """Owns the synchronizer of a fleet.

    Args:
        pool: The fleet's actors.
        roster: Who takes part, and where results go.
        limits: Deadlines.
    """

    def __init__(self, pool: WorkerPool, roster: Roster, limits: Limits) -> None:
        self._pool = pool
        self._roster = roster
        self._limits = limits
        # Longer than a stage's own deadline, so that the one that names the stage ends the wait.
        self._shards = [RayShard(pool, s, limits.refit_s + limits.call_s) for s in pool.shards]
        self._trainers: tuple[TrainerEndpointInfo, ...] = ()
        self._not_trained: tuple[str, ...] = ()
        self._synchronizer: WeightSynchronizer | None = None
        self._transport: str | None = None
        self._replaced: set[int] = set()
        self._version = -1
        self._busy = threading.Lock()

    @property
    def version(self) -> int:
        """Newest version that a refit was run for; -1 before the first."""
        return self._version

    @property
    def trainers(self) -> tuple[TrainerEndpointInfo, ...]:
        """The trainer ranks, empty before they were offered."""
        return self._trainers

    def offer(self, trainers: Sequence[TrainerEndpointInfo], not_trained: Sequence[str]) -> None:
        """Takes the trainer ranks to refit from; the next refit plans anew.

        Raises:
            EngineStateError: A refit is running.
        """
        with self._exclusive():
            self._trainers, self._not_trained = tuple(trainers), tuple(not_trained)
            self._drop()

    def replaced(self, shard: int) -> None:
        """Makes the next refit take in the new engine of a shard."""
        self._replaced.add(shard)

    def connect(self, transport: str) -> Future[Membership]:
        """Records, plans and connects over a transport, in the background.

        Returns:
            A future of the membership that is built.

        Raises:
            ConfigError: The transport or the trainers cannot work; nothing was touched.
            EngineStateError: No trainers were offered, or a refit is running.
        """
        self._select(transport)
        return self._background(self._build)

    def refit(self, transport: str, version: int | None, timeout_s: float) -> Future[RefitReport]:
        """Installs the trainers' weights in every shard that takes part, in the background.

        Args:
            transport: How the bytes travel.
            version: The version that the trainers publish; None for the one after the last.
            timeout_s: Deadline of the refit, seconds.

        Returns:
            A future of the report. It holds an error unless every worker of every shard that was
            not lost committed; the report's ``absent`` names the lost ones.

        Raises:
            ConfigError: The transport or the trainers cannot work; nothing was touched.
            EngineStateError: No trainers were offered, or a refit is running.
        """
        self._select(transport)
        # Engines start at version 0, what they loaded from their checkpoint.
        wanted = max(self._version, 0) + 1 if version is None else version
        return self._background(lambda: self._run(wanted, timeout_s))

    def close(self) -> None:
        """Disconnects; safe twice."""
        self._drop()

    # --- one at a time --------------------------------------------------------------------------

    def _exclusive(self) -> _Exclusive:
        return _Exclusive(self._busy)

    def _background(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        if not self._busy.acquire(blocking=False):
            raise EngineStateError("a refit is running; wait for its future before the next one")

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # whoever waits for the future gets it
                self._busy.release()
                future.set_exception(error)
            else:
                self._busy.release()
                future.set_result(result)

        threading.Thread(target=run, name="generation-refit", daemon=True).start()
        return future

    # --- work -----------------------------------------------------------------------------------

    def _select(self, transport: str) -> None:
        with self._exclusive():
            if not self._trainers:
                raise FleetStateError(
                    "no trainers to refit from; pass their endpoints to prepare_refit_info() first"
                )
            if self._synchronizer is None or transport != self._transport:
                self._drop()
                self._synchronizer = WeightSynchronizer(
                    self._trainers,
                    self._shards,
                    transport=transport,
                    not_trained=self._not_trained,
                    deadline_s=self._limits.refit_s,
                )
                self._transport = transport

    def _drop(self) -> None:
        synchronizer, self._synchronizer = self._synchronizer, None
        if synchronizer is not None:
            synchronizer.shutdown()

    def _current(self) -> WeightSynchronizer:
        if self._synchronizer is None:
            raise EngineStateError("the refit side was shut down; build a new fleet")
        return self._synchronizer

    def _build(self) -> Membership:
        synchronizer = self._current()
        present = self._take_in(synchronizer, self._present())
        try:
            return synchronizer.init_communicator(self._absent(present))
        except BaseException:
            self._bury(present)
            raise

    def _run(self, version: int, timeout_s: float) -> RefitReport:
        synchronizer = self._current()
        present = self._take_in(synchronizer, self._present())
        self._version = max(self._version, version)
        absent = self._absent(present)
        try:
            return synchronizer.sync_weights(version, deadline_s=timeout_s, absent=absent)
        finally:
            self._settle(present, set(synchronizer.absent) - set(absent), version)

    def _present(self) -> list[int]:
        present = self._roster.participants()
        if not present:
            raise NoHealthyShardsError("no shard can take part in a refit; restart one first")
        return present

    def _absent(self, present: Sequence[int]) -> list[int]:
        return [shard for shard in self._pool.shards if shard not in present]

    def _take_in(self, synchronizer: WeightSynchronizer, present: Sequence[int]) -> list[int]:
        """Makes known which engines were replaced; they hold no plan, no group and old weights.

        A replacement that cannot be taken in is left out, so that it holds up nobody else: for dead
        when it does not answer, until the next refit when it refuses.

        Returns:
            Who takes part.

        Raises:
            WeightSyncError: Nobody is left; the first replacement's error.
        """
        left_out: dict[int, WeightSyncError] = {}
        for shard in sorted(self._replaced & set(present)):
            try:
                synchronizer.replace_shard(shard, self._shards[self._pool.shards.index(shard)])
            except (PeerDeadError, DeadlineError) as error:
                self._roster.died(shard, error)
                left_out[shard] = error
            except WeightSyncError as error:
                left_out[shard] = error
            else:
                self._replaced.discard(shard)
        for shard, why in left_out.items():
            logger.warning("the new engine of shard %d is not refitted: %s", shard, why)
        there = [shard for shard in present if shard not in left_out]
        if not there:
            raise next(iter(left_out.values()))
        return there

    def _bury(self, shards: Sequence[int]) -> list[int]:
        """Finds out which shards are dead, so that the next try skips them; returns the others."""
        answers = self._pool.ask(shards, "is_alive", timeout_s=self._limits.call_s)
        for shard, answer in answers.items():
            if answer.dead:
                self._roster.died(shard, answer.error or "died")
        return [shard for shard in shards if not answers[shard].dead]

    def _settle(self, shards: Sequence[int], lost: set[int], version: int) -> None:
        """Tells the roster about every shard, by what the shard's own engine says.

        A shard that was lost is taken for dead, also when it is only frozen: it missed a version,
        and comes back by a restart.
        """
        synchronizer = self._current()
        for shard in sorted(lost):
            self._roster.died(shard, f"lost in the refit of version {version}")
        alive = self._bury([shard for shard in shards if shard not in lost])
        held = self._pool.ask(alive, "refit_unfinished", timeout_s=self._limits.call_s)
        versions = synchronizer.shard_versions
        some_committed = any(versions[shard] == version for shard in shards)
        for shard in alive:
            whole = held[shard].value is False
            if whole and versions[shard] == version:
                self._roster.refitted(shard, version)
            elif not whole or some_committed:
                self._roster.torn(shard)


class _Exclusive:
    """Holds a lock that is free, or says that a refit is running."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise EngineStateError("a refit is running; wait for its future first")

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
