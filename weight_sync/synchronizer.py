"""The one call a trainer makes after each optimizer step: push the new weights into every engine."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weight_sync import env
from weight_sync.comm.deadline import Deadline
from weight_sync.engine import EngineShard
from weight_sync.errors import ConfigError, EngineStateError
from weight_sync.fanout import raise_first
from weight_sync.manifest import Manifest, build_catalogue
from weight_sync.membership import Membership, MembershipTracker
from weight_sync.messages import (
    Attach,
    Attached,
    Detach,
    Done,
    Record,
    Recorded,
    SetProgram,
    TrainerEndpointInfo,
)
from weight_sync.participants import Shards, TrainerRanks, raise_shards
from weight_sync.plan import DEFAULT_BUCKET_BYTES, Plan, build_plan
from weight_sync.progress import Progress
from weight_sync.refit import commit_version
from weight_sync.replicas import check_replicas
from weight_sync.report import STAGES, RefitReport
from weight_sync.transports.registry import check_transport

# How long telling everybody that a refit ended, or that all is over, may take.
_FAREWELL_SECONDS = 10.0


class WeightSynchronizer:
    """Keeps engine shards at the trainer's weight version.

    Args:
        trainers: One entry per trainer rank, in rank order (``TrainerEndpoint.info``).
        shards: Engine shards; all have the same number of workers.
        transport: ``"ipc"``, ``"broadcast"`` or ``"reshard"``.
        not_trained: Names or ``prefix*``: trainer tensors the engine may ignore, engine parameters
            that keep their values.
        deadline_s: Longest time one stage may take.
        bucket_bytes: Bucket size of packed and staged transfers.

    Raises:
        ConfigError: Listing every setting that cannot work, before anything is touched.
    """

    def __init__(
        self,
        trainers: Sequence[TrainerEndpointInfo],
        shards: Sequence[EngineShard],
        *,
        transport: str = "ipc",
        not_trained: Sequence[str] = (),
        deadline_s: float | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        problems = []
        try:
            check_transport(transport)
        except ConfigError as error:
            problems.append(str(error))
        if [t.rank for t in trainers] != list(range(len(trainers))) or not trainers:
            problems.append(
                f"trainers must be ranks 0..n-1 in order, not {[t.rank for t in trainers]}"
            )
        if not shards or len({s.workers for s in shards}) > 1:
            problems.append(
                f"shards must be at least one and have equally many workers, not "
                f"{[s.workers for s in shards]}"
            )
        if bucket_bytes < 1:
            problems.append(f"bucket_bytes must be positive, not {bucket_bytes}")
        if problems:
            raise ConfigError("; ".join(problems))
        self._trainers = TrainerRanks(trainers)
        self._shards = Shards(shards)
        self._transport = transport
        self._not_trained = tuple(not_trained)
        self._seconds = env.deadline_seconds() if deadline_s is None else deadline_s
        self._bucket_bytes = bucket_bytes
        width = shards[0].workers
        self._tracker = MembershipTracker(len(trainers), len(shards), len(shards) * width)
        self._plan: Plan | None = None
        self._plan_seconds = 0.0
        self._replicas_checked = False
        self._stale = True
        self._version = -1
        self._shard_versions = [-1] * len(shards)
        self._closed = False

    # --- state ----------------------------------------------------------------------------------

    @property
    def is_stale(self) -> bool:
        """True before the first refit and from the first byte of a refit until its commit."""
        return self._stale

    @property
    def version(self) -> int:
        """Last version all present shards committed; -1 before the first."""
        return self._version

    @property
    def shard_versions(self) -> tuple[int, ...]:
        """Last version each shard committed; -1 while it may hold mixed weights."""
        return tuple(self._shard_versions)

    @property
    def membership(self) -> Membership | None:
        """What groups and plan are built for; None if they must be built."""
        return self._tracker.built

    @property
    def plan(self) -> Plan | None:
        """The current plan."""
        return self._plan

    # --- set-up ---------------------------------------------------------------------------------

    def init_communicator(self, absent: Sequence[int] = ()) -> Membership:
        """Records, plans and connects; no weight is touched.

        Args:
            absent: Shards that do not take part.

        Raises:
            CoverageError: If names, shapes or dtypes of trainer and engine do not match.
            WeightSyncError: Naming who failed and what to do.
        """
        self._require_open()
        membership = self._tracker.begin_build(absent)
        deadline = Deadline(self._seconds)
        start = time.perf_counter()
        manifests = self._trainers.manifests(deadline)
        catalogue = build_catalogue(manifests)
        recorded = self._record(membership, Record(catalogue.tensors, self._not_trained), deadline)
        plan = build_plan(
            membership,
            manifests,
            [r.recording for r in recorded],
            cost=_distance(manifests, recorded),
            bucket_bytes=self._bucket_bytes,
            not_trained=self._not_trained,
        )
        self._trainers.ask(
            lambda peer: SetProgram(plan.sender_program(peer.rank)),
            Done,
            deadline,
            "plan",
            epoch=membership.epoch,
        )
        self._plan_seconds = time.perf_counter() - start
        self._attach(plan, deadline)
        self._plan = plan
        self._replicas_checked = False
        self._tracker.finish_build(membership)
        return membership

    def _record(
        self, membership: Membership, request: Record, deadline: Deadline
    ) -> list[Recorded]:
        replies, errors = self._shards.ask(
            dict.fromkeys(membership.shards, request),
            Recorded,
            deadline,
            "record",
            epoch=membership.epoch,
        )
        raise_shards(errors)
        return [reply for shard in membership.shards for reply in replies[shard]]

    def _attach(self, plan: Plan, deadline: Deadline) -> None:
        membership = plan.membership
        width = membership.workers_per_shard
        requests = {
            shard: Attach(
                tuple(plan.receiver_program(membership.prefix(shard) + i) for i in range(width)),
                self._trainers.infos,
                self._transport,
                deadline.remaining(),
            )
            for shard in membership.shards
        }
        _, errors = self._shards.ask(
            requests, Attached, deadline, "connect", epoch=membership.epoch
        )
        raise_shards(errors)

    # --- refit ----------------------------------------------------------------------------------

    def sync_weights(
        self, version: int, *, verify: bool = True, deadline_s: float | None = None
    ) -> RefitReport:
        """Installs the trainer's weights of ``version`` in every present shard.

        Every trainer rank must publish the version, before this call or while it runs. When it
        returns, trainers may change their weights again.

        Args:
            version: Grows with every call.
            verify: Compare digests of every tensor on every worker before the version counts.
            deadline_s: Longest time one stage may take.

        Raises:
            RefitError: Naming stage, version, epoch and ranks. If live bytes may have changed,
                :attr:`is_stale` stays true and affected shards stay paused.
        """
        self._require_open()
        if version <= self._version:
            raise EngineStateError(
                f"version {version} is not newer than {self._version}; versions must grow"
            )
        if self._tracker.built is None:
            self.init_communicator()
        plan = self._plan
        assert plan is not None
        seconds = self._seconds if deadline_s is None else deadline_s
        error = ""
        try:
            with Progress(f"refit v{version}", STAGES) as progress:
                return self._refit(plan, version, verify, seconds, progress)
        except BaseException as problem:
            error = str(problem) or type(problem).__name__
            raise
        finally:
            untold = self._trainers.release(
                version, error, Deadline(min(self._seconds, _FAREWELL_SECONDS))
            )
            if not error:
                raise_first(untold)

    def _refit(
        self, plan: Plan, version: int, verify: bool, seconds: float, progress: Progress
    ) -> RefitReport:
        begin = time.perf_counter()
        epoch = plan.membership.epoch
        progress.stage("publish")
        deadline = Deadline(seconds)
        self._trainers.await_version(version, epoch, deadline)
        if verify and not self._replicas_checked:
            check_replicas(plan, self._trainers, version, deadline)
            self._replicas_checked = True
        published = time.perf_counter() - begin
        outcome = commit_version(
            self._shards,
            plan,
            version,
            verify=verify,
            seconds=seconds,
            generations=tuple(peer.generation for peer in self._trainers.peers),
            first_byte=self._mark_stale,
            stage=progress.stage,
        )
        for shard in plan.membership.shards:
            self._shard_versions[shard] = version if shard in outcome.committed else -1
        if outcome.errors:
            self._tracker.invalidate()
            raise_shards(outcome.errors)
        self._version = version
        self._stale = False
        spent = {"publish": published, **outcome.seconds}
        if self._plan_seconds:
            spent["plan"], self._plan_seconds = self._plan_seconds, 0.0
        workers = [w for replies in outcome.committed.values() for w in replies]
        return RefitReport(
            version=version,
            epoch=epoch,
            transport=self._transport,
            tensors=plan.tensors,
            bytes=sum(w.nbytes for w in workers),
            seconds=spent,
            total_seconds=time.perf_counter() - begin,
            pause_seconds=outcome.pause_seconds,
            modes=workers[0].modes,
            verified=all(w.verified for w in workers),
            workers=len(workers),
        )

    def _mark_stale(self) -> None:
        self._stale = True

    def _require_open(self) -> None:
        if self._closed:
            raise EngineStateError("the synchronizer was shut down; make a new one")

    def shutdown(self) -> None:
        """Detaches workers and closes connections; safe twice."""
        if self._closed:
            return
        self._closed = True
        built = self._tracker.built
        if built is not None:
            self._shards.ask(
                dict.fromkeys(built.shards, Detach("shutdown")),
                Done,
                Deadline(min(self._seconds, _FAREWELL_SECONDS)),
                "shutdown",
            )
        self._trainers.close()


def _distance(manifests: Sequence[Manifest], recorded: Sequence[Recorded]) -> NDArray[np.int8]:
    """int8 ``[trainers, workers]``: 0 same device, 1 same host, 2 another host."""
    cost = np.full((len(manifests), len(recorded)), 2, np.int8)
    for i, manifest in enumerate(manifests):
        for j, worker in enumerate(recorded):
            if manifest.host == worker.host:
                cost[i, j] = 0 if manifest.device == worker.device else 1
    return cost
