"""Builds the groups of an epoch and lets trainer ranks and workers move bytes through them.

The control plane's part of broadcast and reshard. It holds the rendezvous, which survives every
trainer and engine process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from weight_sync.comm.attendance import Attendance
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.rendezvous import Rendezvous, RendezvousHost
from weight_sync.errors import PlanMismatchError, WeightSyncError
from weight_sync.fanout import raise_first, run_all
from weight_sync.manifest import Manifest
from weight_sync.messages import (
    AbortGroups,
    Attached,
    Detach,
    Done,
    GroupSpec,
    Joined,
    JoinGroups,
    Message,
    SendRounds,
    StageVersion,
    TrainerEndpointInfo,
    VersionStaged,
)
from weight_sync.plan import Plan
from weight_sync.program import BroadcastKeeps, BroadcastSends
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.transports.broadcast_layout import broadcast_layout
from weight_sync.transports.groups import trainer_name
from weight_sync.transports.rounds import cut_rounds, reshard_steps, stream_bucket_bytes
from weight_sync.wire.address import host_towards
from weight_sync.worker.peer import WorkerPeer

Reply = TypeVar("Reply", bound=Message)

# How long telling everybody to give up may take.
_ABORT_SECONDS = 1.0


@dataclass(frozen=True)
class _Cut:
    """How the bytes of an epoch are cut.

    Attributes:
        rounds: End of each round, in steps.
        bucket_bytes: Bucket size of one stream.
        sends: Per trainer rank, for broadcasts.
        keeps: Per class of workers, for broadcasts.
    """

    rounds: tuple[int, ...]
    bucket_bytes: int
    sends: tuple[BroadcastSends | None, ...]
    keeps: tuple[BroadcastKeeps | None, ...]


class Conductor:
    """The groups of one epoch.

    Attributes:
        groups: What everybody joined, in launch order.

    Args:
        transport: ``"broadcast"`` or ``"reshard"``.
        plan: The plan; all participants hold their parts of it.
        manifests: One per trainer rank.
        trainers: Where trainer ranks listen.
        attached: What each worker answered to its attachment, in worker order.
        stage_bytes: Limit of staging memory per worker, besides what is free; None for no limit.
        deadline: When to give up.

    Raises:
        ConfigError: If a worker cannot hold even the smallest round.
        WeightSyncError: Naming who could not join; everybody has left the groups then.
    """

    def __init__(
        self,
        transport: str,
        plan: Plan,
        manifests: Sequence[Manifest],
        trainers: Sequence[TrainerEndpointInfo],
        attached: Sequence[Attached],
        stage_bytes: int | None,
        deadline: Deadline,
    ) -> None:
        self._plan = plan
        membership = plan.membership
        self._epoch = membership.epoch
        workers = [membership.describe(w) for w in range(membership.workers)]
        limits = [a.spare_bytes for a in attached]
        if stage_bytes is not None:
            limits = [min(limit, stage_bytes) for limit in limits]
        cut = (
            _cut_broadcast(plan, limits) if transport == "broadcast" else _cut_reshard(plan, limits)
        )
        self._rounds = len(cut.rounds)
        self._aborted = False
        self._infos = tuple(trainers)
        self._host = RendezvousHost(
            host_towards(trainers[0].address) or "127.0.0.1", self._epoch, transport
        )
        self._trainers: dict[str, TrainerPeer] = {}
        self._workers: dict[str, WorkerPeer] = {}
        try:
            for info in trainers:
                self._trainers[trainer_name(info.rank)] = TrainerPeer(info.rank, info.address)
            for name, answer in zip(workers, attached, strict=True):
                self._workers[name] = WorkerPeer(name, answer.control)
            stages = (
                [0] * len(manifests) if transport == "broadcast" else [m.stage for m in manifests]
            )
            self.groups = _groups(self._host.rendezvous, stages, workers)
            self._join(self.groups, cut, deadline)
        except BaseException as error:
            self.abort(f"the groups could not be built: {error}")
            self.close()
            raise

    def _join(self, specs: tuple[GroupSpec, ...], cut: _Cut, deadline: Deadline) -> None:
        plan, seconds = self._plan, deadline.inner()

        def request(
            sends: BroadcastSends | None = None, keeps: BroadcastKeeps | None = None
        ) -> JoinGroups:
            return JoinGroups(
                self._epoch,
                plan.digest,
                specs,
                cut.rounds,
                cut.bucket_bytes,
                seconds,
                sends,
                keeps,
            )

        calls: dict[str, Callable[[], Joined]] = {}
        for info, (name, peer) in zip(self._infos, self._trainers.items(), strict=True):
            calls[name] = _call(
                peer, request(sends=cut.sends[info.rank]), Joined, deadline, "connect"
            )
        for c, (name, worker) in zip(plan.worker_class, self._workers.items(), strict=True):
            calls[name] = _call(worker, request(keeps=cut.keeps[c]), Joined, deadline, "connect")
        joined = self._run(
            calls, deadline, "connect", None, lambda who: _excuse(specs, who, deadline)
        )
        _compare_cuts(joined)

    @property
    def later_rounds(self) -> bool:
        """Whether :meth:`send_later` has something to send while versions are installed."""
        return self._rounds > 1

    def stage(self, version: int, verify: bool, deadline: Deadline) -> dict[str, float]:
        """Lets every worker receive the first round of a version into spare memory.

        Returns:
            Seconds per stage, of the slowest worker.

        Raises:
            WeightSyncError: Naming who failed; no live weight was changed. The groups are aborted.
        """
        start = time.perf_counter()
        send = SendRounds(self._epoch, self._plan.digest, version, 0, 1, deadline.inner())
        stage = StageVersion(self._epoch, self._plan.digest, version, verify, deadline.inner())
        calls: dict[str, Callable[[], Message]] = {}
        for name, peer in self._trainers.items():
            calls[name] = _call(peer, send, Done, deadline, "transfer", version, self._epoch)
        for name, worker in self._workers.items():
            calls[name] = _call(
                worker, stage, VersionStaged, deadline, "transfer", version, self._epoch
            )
        replies = self._run(calls, deadline, "transfer", version)
        spent: dict[str, float] = {}
        for reply in replies.values():
            if isinstance(reply, VersionStaged):
                for name, seconds in reply.seconds.items():
                    spent[name] = max(spent.get(name, 0.0), seconds)
        spent["stage"] = max(time.perf_counter() - start - sum(spent.values()), 0.0)
        return spent

    def send_later(self, version: int, deadline: Deadline) -> None:
        """Lets trainer ranks send all rounds but the first.

        Raises:
            WeightSyncError: Naming who failed; the groups are aborted.
        """
        send = SendRounds(
            self._epoch, self._plan.digest, version, 1, self._rounds, deadline.inner()
        )
        calls = {
            name: _call(peer, send, Done, deadline, "transfer", version, self._epoch)
            for name, peer in self._trainers.items()
        }
        self._run(calls, deadline, "transfer", version)

    def _run(
        self,
        calls: Mapping[str, Callable[[], Reply]],
        deadline: Deadline,
        stage: str,
        version: int | None,
        failed: Callable[[str], None] | None = None,
    ) -> dict[str, Reply]:
        def give_up(who: str) -> None:
            self.abort(f"{stage} failed at {who}")

        replies, errors = run_all(
            calls,
            lambda call: call(),
            deadline,
            stage,
            version,
            self._epoch,
            failed or give_up,
        )
        raise_first(errors)
        return replies

    def abort(self, reason: str) -> None:
        """Tells everybody to give up; who cannot be reached is left to its own deadline.

        Uses connections of its own, because the usual ones may be waiting for a reply.
        """
        if self._aborted:
            return
        self._aborted = True
        request = AbortGroups(self._epoch, reason)
        deadline = Deadline(_ABORT_SECONDS)

        def tell(peer: TrainerPeer | WorkerPeer) -> None:
            fresh: TrainerPeer | WorkerPeer = peer.fresh()
            try:
                fresh.call(request, Done, deadline, "abort", None, self._epoch)
            finally:
                fresh.close()

        # The answers do not matter: the refit has failed already, for a reason that is known.
        everybody: dict[str, TrainerPeer | WorkerPeer] = {**self._trainers, **self._workers}
        run_all(everybody, tell, deadline, "abort")

    def dismiss(self) -> None:
        """Lets trainer ranks leave the groups; workers leave when they are detached."""
        deadline = Deadline(_ABORT_SECONDS)

        def tell(peer: TrainerPeer) -> None:
            peer.call(
                Detach(self._epoch, "the synchronizer was shut down"), Done, deadline, "shutdown"
            )

        # A rank that cannot be reached any more has nothing to leave.
        run_all(self._trainers, tell, deadline, "shutdown")

    def close(self) -> None:
        """Closes connections and the rendezvous; call it after everybody left or was aborted."""
        for trainer in self._trainers.values():
            trainer.close()
        for worker in self._workers.values():
            worker.close()
        self._host.close()


def _call(
    peer: TrainerPeer | WorkerPeer,
    request: Message,
    expect: type[Reply],
    deadline: Deadline,
    stage: str,
    version: int | None = None,
    epoch: int | None = None,
) -> Callable[[], Reply]:
    return lambda: peer.call(request, expect, deadline, stage, version, epoch)


def _excuse(specs: Sequence[GroupSpec], who: str, deadline: Deadline) -> None:
    """Says in the rendezvous that a participant will not come, so that nobody waits for it."""
    for spec in specs:
        if who in spec.names:
            rank = spec.names.index(who)
            soon = deadline.sooner(_ABORT_SECONDS)
            try:
                absent = Attendance(spec.rendezvous, rank, spec.names, soon)
            except WeightSyncError:
                continue  # The others then wait until their deadline, which is only slower.
            absent.leave("could not join")
            absent.close()


def _groups(
    rendezvous: Rendezvous, stages: Sequence[int], workers: Sequence[str]
) -> tuple[GroupSpec, ...]:
    """One group per pipeline stage, in the order of stages: that is the launch order everywhere."""
    specs = []
    for stage in sorted(set(stages)):
        ranks = tuple(rank for rank, s in enumerate(stages) if s == stage)
        names = (*(trainer_name(rank) for rank in ranks), *workers)
        specs.append(GroupSpec(rendezvous.group(f"stage{stage}"), ranks, names))
    return tuple(specs)


def _cut_reshard(plan: Plan, limits: Sequence[int]) -> _Cut:
    bucket_bytes = stream_bucket_bytes(plan)
    kept = reshard_steps(plan, bucket_bytes)
    rounds = cut_rounds(kept, limits, np.ones(kept.shape[1], bool))
    ranks = plan.membership.trainer_world_size
    return _Cut(rounds, bucket_bytes, (None,) * ranks, (None,) * len(plan.pieces))


def _cut_broadcast(plan: Plan, limits: Sequence[int]) -> _Cut:
    layout = broadcast_layout(plan)
    kept = [layout.kept_bytes(c) for c in range(len(plan.pieces))]
    scratch = 2 * int(layout.nbytes.max(initial=0))
    rounds = cut_rounds(
        np.stack([kept[c] for c in plan.worker_class]),
        [limit - scratch for limit in limits],
        layout.closed,
    )
    return _Cut(
        rounds,
        plan.bucket_bytes,
        tuple(layout.sends(r) for r in range(plan.membership.trainer_world_size)),
        tuple(layout.keeps(c) for c in range(len(plan.pieces))),
    )


def _compare_cuts(joined: Mapping[str, Joined]) -> None:
    """Both sides of every stream must have cut the same buckets.

    Raises:
        PlanMismatchError: Naming the pair that differs; nothing was sent.
    """
    for name, reply in joined.items():
        for peer, cut in reply.cuts.items():
            others = [joined[peer]] if peer else list(joined.values())
            if any(other.cuts.get(name if peer else "") != cut for other in others):
                raise PlanMismatchError(
                    f"{name} and {peer or 'others'} cut different buckets from one plan; they run "
                    "different versions of this library. Nothing was sent."
                )
