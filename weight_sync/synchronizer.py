"""The one call a trainer makes after each optimizer step: push the new weights into every engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from weight_sync import env
from weight_sync.comm.deadline import Deadline
from weight_sync.engine import EngineShard
from weight_sync.errors import (
    ConfigError,
    EngineStateError,
    ReplicaMismatchError,
    WeightSyncError,
    shorten,
)
from weight_sync.fanout import raise_first, run_all
from weight_sync.manifest import Manifest, build_catalogue
from weight_sync.membership import Membership, MembershipTracker
from weight_sync.messages import (
    Attach,
    Attached,
    Commit,
    Committed,
    Detach,
    Digests,
    Done,
    Failure,
    GetReplicaDigests,
    Message,
    Record,
    Recorded,
    Release,
    SetProgram,
    TrainerEndpointInfo,
    decode_worker_reply,
    encode,
    to_error,
)
from weight_sync.plan import DEFAULT_BUCKET_BYTES, Plan, build_plan
from weight_sync.progress import Progress
from weight_sync.report import STAGES, RefitReport
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.transports.registry import check_transport

Reply = TypeVar("Reply", bound=Message)


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
            problems.append(f"trainers must be ranks 0..n-1 in order, not {[t.rank for t in trainers]}")
        if not shards or len({s.workers for s in shards}) > 1:
            problems.append(
                f"shards must be at least one and have equally many workers, not "
                f"{[s.workers for s in shards]}"
            )
        if bucket_bytes < 1:
            problems.append(f"bucket_bytes must be positive, not {bucket_bytes}")
        if problems:
            raise ConfigError("; ".join(problems))
        self._trainers = tuple(trainers)
        self._shards = tuple(shards)
        self._transport = transport
        self._not_trained = tuple(not_trained)
        self._seconds = env.deadline_seconds() if deadline_s is None else deadline_s
        self._bucket_bytes = bucket_bytes
        self._peers = [TrainerPeer(t.rank, t.address) for t in trainers]
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
        manifests = self._manifests(deadline)
        catalogue = build_catalogue(manifests)
        recorded = self._call_workers(
            membership, Record(catalogue.tensors, self._not_trained), Recorded, deadline, "record"
        )
        plan = build_plan(
            membership,
            manifests,
            [r.recording for r in recorded],
            cost=_distance(manifests, recorded),
            bucket_bytes=self._bucket_bytes,
            not_trained=self._not_trained,
        )
        self._call_trainers(
            lambda peer: SetProgram(plan.sender_program(peer.rank)),
            Done,
            deadline,
            "plan",
        )
        self._plan_seconds = time.perf_counter() - start
        self._attach(membership, plan, deadline)
        self._plan = plan
        self._replicas_checked = False
        self._tracker.finish_build(membership)
        return membership

    def _manifests(self, deadline: Deadline) -> list[Manifest]:
        results, errors = run_all(
            {p.name: (lambda p=p: p.manifest(deadline)) for p in self._peers}, deadline, "manifest"
        )
        raise_first(errors)
        return [results[p.name] for p in self._peers]

    def _attach(self, membership: Membership, plan: Plan, deadline: Deadline) -> None:
        width = membership.workers_per_shard
        requests = {}
        for shard in membership.shards:
            first = membership.prefix(shard)
            programs = tuple(plan.receiver_program(first + i) for i in range(width))
            requests[shard] = Attach(
                programs, self._trainers, self._transport, deadline.remaining()
            )
        results, errors = run_all(
            {
                f"shard {s}": (lambda s=s: self._ask(s, requests[s], Attached))
                for s in membership.shards
            },
            deadline,
            "connect",
            epoch=membership.epoch,
        )
        raise_first(errors)

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
        membership, plan = self._tracker.built, self._plan
        assert membership is not None
        assert plan is not None
        error = ""
        try:
            with Progress(f"refit v{version}", STAGES) as progress:
                return self._refit(
                    membership,
                    plan,
                    version,
                    verify,
                    self._seconds if deadline_s is None else deadline_s,
                    progress,
                )
        except BaseException as problem:
            error = str(problem) or type(problem).__name__
            raise
        finally:
            self._release(version, error)

    def _refit(
        self,
        membership: Membership,
        plan: Plan,
        version: int,
        verify: bool,
        limit: float,
        progress: Progress,
    ) -> RefitReport:
        begin = time.perf_counter()
        seconds: dict[str, float] = {}
        deadline = Deadline(limit)
        progress.stage("publish")
        self._await_version(version, membership.epoch, deadline)
        if verify and not self._replicas_checked:
            self._check_replicas(plan, version, deadline)
            self._replicas_checked = True
        seconds["publish"] = time.perf_counter() - begin

        progress.stage("pause")
        paused_at = time.perf_counter()
        self._on_shards(membership, "pause", lambda shard: shard.pause(), deadline, version)
        seconds["pause"] = time.perf_counter() - paused_at

        progress.stage("transfer")
        commit_at = time.perf_counter()
        self._stale = True
        request = Commit(membership.epoch, plan.digest, version, verify, limit)
        replies, errors = run_all(
            {
                f"shard {s}": (lambda s=s: self._ask(s, request, Committed))
                for s in membership.shards
            },
            Deadline(limit),
            "transfer",
            version,
            membership.epoch,
        )
        commit_seconds = time.perf_counter() - commit_at
        good = [s for s in membership.shards if f"shard {s}" in replies]
        for shard in membership.shards:
            self._shard_versions[shard] = version if shard in good else -1
        workers = [w for s in good for w in replies[f"shard {s}"]]
        for stage in {name for w in workers for name in w.seconds}:
            seconds[stage] = max(w.seconds.get(stage, 0.0) for w in workers)
        inside = sum(seconds.get(s, 0.0) for s in ("transfer", "process", "verify"))
        seconds["export"] = max(commit_seconds - inside, 0.0)

        progress.stage("invalidate")
        at = time.perf_counter()
        self._finish_shards(good, version, deadline=Deadline(limit))
        seconds["invalidate"] = time.perf_counter() - at
        progress.stage("resume")
        at = time.perf_counter()
        self._on_shards(membership, "resume", lambda s: s.resume(), Deadline(limit), version, good)
        seconds["resume"] = time.perf_counter() - at
        pause_seconds = time.perf_counter() - paused_at
        if errors:
            self._tracker.invalidate()
            raise_first(errors)
        if self._plan_seconds:
            seconds["plan"], self._plan_seconds = self._plan_seconds, 0.0
        self._version = version
        self._stale = False
        return RefitReport(
            version=version,
            epoch=membership.epoch,
            transport=self._transport,
            tensors=plan.tensors,
            bytes=sum(w.nbytes for w in workers),
            seconds=seconds,
            total_seconds=time.perf_counter() - begin,
            pause_seconds=pause_seconds,
            modes=workers[0].modes,
            verified=all(w.verified for w in workers),
            workers=len(workers),
        )

    def _finish_shards(self, shards: Sequence[int], version: int, deadline: Deadline) -> None:
        membership = self._tracker.built
        assert membership is not None

        def finish(shard: EngineShard) -> None:
            shard.invalidate()
            shard.set_version(version)

        self._on_shards(membership, "invalidate", finish, deadline, version, shards)

    def _await_version(self, version: int, epoch: int, deadline: Deadline) -> None:
        _, errors = run_all(
            {
                p.name: (lambda p=p: p.await_version(version, epoch, deadline))
                for p in self._peers
            },
            deadline,
            "publish",
            version,
            epoch,
        )
        raise_first(errors)

    def _check_replicas(self, plan: Plan, version: int, deadline: Deadline) -> None:
        """Owners of one region must hold equal bytes; checked once per epoch.

        Raises:
            ReplicaMismatchError: Naming tensors and ranks, before anything live changes.
        """
        regions = plan.regions
        owners = np.diff(regions.owner_first)
        shared = np.flatnonzero(owners > 1)
        if not len(shared):
            return
        ranks = np.unique(
            np.concatenate(
                [
                    regions.owner_rank[regions.owner_first[g] : regions.owner_first[g + 1]]
                    for g in shared
                ]
            )
        ).tolist()
        results, errors = run_all(
            {
                str(r): (
                    lambda r=r: self._peers[r].call(
                        GetReplicaDigests(version), Digests, deadline, "publish", version
                    )
                )
                for r in ranks
            },
            deadline,
            "publish",
            version,
        )
        raise_first(errors)
        sums = {int(r): d.values.unpack() for r, d in results.items()}
        bad = []
        for g in shared.tolist():
            at = slice(regions.owner_first[g], regions.owner_first[g + 1])
            held = regions.owner_rank[at].tolist()
            values = [
                int(sums[r][n]) for r, n in zip(held, regions.owner_region[at].tolist(), strict=True)
            ]
            if len(set(values)) > 1:
                name = plan.catalogue.tensors[int(regions.tensor[g])].name
                bad.append(f"{name} (trainer ranks {held})")
        if bad:
            raise ReplicaMismatchError(
                f"replicas hold different bytes in version {version}: {shorten(bad)}. Nothing was "
                "changed in any engine. Make the ranks agree (broadcast the parameter) and try again."
            )

    def _release(self, version: int, error: str) -> None:
        deadline = Deadline(min(self._seconds, 10.0))
        _, errors = run_all(
            {
                p.name: (
                    lambda p=p: p.call(Release(version, error), Done, deadline, "release", version)
                )
                for p in self._peers
            },
            deadline,
            "release",
            version,
        )
        if not error:
            raise_first(errors)

    # --- plumbing -------------------------------------------------------------------------------

    def _ask(self, shard: int, request: Message, expect: type[Reply]) -> list[Reply]:
        """One request to every worker of a shard; success is an explicit answer from each."""
        raw = self._shards[shard].call(encode(request))
        width = self._shards[shard].workers
        if len(raw) != width:
            raise WeightSyncError(
                f"shard {shard} answered for {len(raw)} of {width} workers; restart the shard"
            )
        replies: list[Reply] = []
        for worker, data in enumerate(raw):
            reply = decode_worker_reply(data)
            who = f"shard {shard} worker {worker}"
            if isinstance(reply, Failure):
                raise to_error(reply, who)
            if not isinstance(reply, expect) or getattr(reply, "worker", worker) != worker:
                raise WeightSyncError(
                    f"{who} answered {type(reply).__name__} where {expect.__name__} was expected; "
                    "an earlier reply was lost, restart the shard"
                )
            replies.append(reply)
        return replies

    def _call_workers(
        self,
        membership: Membership,
        request: Message,
        expect: type[Reply],
        deadline: Deadline,
        stage: str,
    ) -> list[Reply]:
        results, errors = run_all(
            {f"shard {s}": (lambda s=s: self._ask(s, request, expect)) for s in membership.shards},
            deadline,
            stage,
            epoch=membership.epoch,
        )
        raise_first(errors)
        return [reply for s in membership.shards for reply in results[f"shard {s}"]]

    def _call_trainers(
        self,
        request: Callable[[TrainerPeer], Message],
        expect: type[Reply],
        deadline: Deadline,
        stage: str,
    ) -> None:
        _, errors = run_all(
            {p.name: (lambda p=p: p.call(request(p), expect, deadline, stage)) for p in self._peers},
            deadline,
            stage,
        )
        raise_first(errors)

    def _on_shards(
        self,
        membership: Membership,
        stage: str,
        action: Callable[[EngineShard], None],
        deadline: Deadline,
        version: int,
        shards: Sequence[int] | None = None,
    ) -> None:
        chosen = membership.shards if shards is None else shards
        done, errors = run_all(
            {f"shard {s}": (lambda s=s: action(self._shards[s])) for s in chosen},
            deadline,
            stage,
            version,
            membership.epoch,
        )
        if errors and stage == "pause":
            # A partial pause is undone: no byte moved, so everybody may go on.
            run_all({who: self._resume_call(who) for who in done}, deadline, "resume")
        raise_first(errors)

    def _resume_call(self, who: str) -> Callable[[], None]:
        return self._shards[int(who.removeprefix("shard "))].resume

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
            run_all(
                {
                    f"shard {s}": (lambda s=s: self._ask(s, Detach("shutdown"), Done))
                    for s in built.shards
                },
                Deadline(min(self._seconds, 10.0)),
                "shutdown",
            )
        for peer in self._peers:
            peer.close()


def _distance(manifests: Sequence[Manifest], recorded: Sequence[Recorded]) -> NDArray[np.int8]:
    """int8 ``[trainers, workers]``: 0 same device, 1 same host, 2 another host."""
    cost = np.full((len(manifests), len(recorded)), 2, np.int8)
    for i, manifest in enumerate(manifests):
        for j, worker in enumerate(recorded):
            if manifest.host == worker.host:
                cost[i, j] = 0 if manifest.device == worker.device else 1
    return cost

