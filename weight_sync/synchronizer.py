"""The one call a trainer makes after each optimizer step: push new weights into every engine."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from functools import partial

from msgspec import structs

from weight_sync import env
from weight_sync.awake import require_awake
from weight_sync.build import Controls, attach, make_plan, meet, record
from weight_sync.comm.deadline import Deadline
from weight_sync.conductor import Conductor
from weight_sync.engine import EngineShard
from weight_sync.errors import ConfigError, EngineStateError, StaleEpochError, WeightSyncError
from weight_sync.fanout import raise_first
from weight_sync.manifest import Manifest
from weight_sync.membership import Membership, MembershipTracker
from weight_sync.messages import Attached, Detach, Done, TrainerEndpointInfo
from weight_sync.negotiation import negotiate
from weight_sync.participants import Shards, TrainerRanks, raise_shards
from weight_sync.plan import DEFAULT_BUCKET_BYTES, Plan
from weight_sync.presence import Presence
from weight_sync.progress import Progress
from weight_sync.quantize.wanted import QuantSpec
from weight_sync.recovery import explain, shards_of, take_stock, worth_retrying
from weight_sync.refit import SURE_SECONDS, commit_version, report_of
from weight_sync.replicas import check_replicas
from weight_sync.report import STAGES, RefitReport
from weight_sync.rollcall import Missing, Vigil
from weight_sync.settings import check_settings
from weight_sync.transports.registry import GROUPED
from weight_sync.wire.address import Address

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
        deadline_s: Longest time one refit may take, with a retry if there is one. After a failure
            it takes up to as long again, but no longer than three times ``silence_s``, to find
            out who is missing and to tell everybody.
        bucket_bytes: Bucket size of packed and staged transfers.
        stage_bytes: Most memory that broadcast and reshard may use on each worker to receive into;
            what is free if None. Where a worker's weights do not fit, they arrive in rounds while
            generation is paused.
        retry_survivors: Whether a refit that lost engine shards, or a connection, is tried once
            more without the lost ones.
        silence_s: A participant that does not even say that it runs for so long is frozen: it is
            not waited for until the deadline.

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
        stage_bytes: int | None = None,
        retry_survivors: bool = True,
        silence_s: float = 10.0,
    ) -> None:
        check_settings(trainers, shards, transport, bucket_bytes, stage_bytes, silence_s)
        self._trainers = TrainerRanks(trainers)
        self._shards = Shards(shards)
        self._transport = transport
        self._not_trained = tuple(not_trained)
        self._seconds = env.deadline_seconds() if deadline_s is None else deadline_s
        self._bucket_bytes = bucket_bytes
        self._stage_bytes = stage_bytes
        self._conductor: Conductor | None = None
        width = shards[0].workers
        self._tracker = MembershipTracker(len(trainers), len(shards), len(shards) * width)
        self._plan: Plan | None = None
        self._wanted: tuple[QuantSpec, ...] = ()
        self._plan_seconds = 0.0
        self._replicas_checked = False
        self._retry_survivors = retry_survivors
        self._silence = silence_s
        self._patience = _FAREWELL_SECONDS
        self._stage_name = ""
        self._stale = True
        self._version = -1
        self._shard_versions = [-1] * len(shards)
        self._presence = Presence()
        # Shards that may hold mixed weights.
        self._torn: set[int] = set()
        self._controls = Controls({})
        self._missing = Missing()
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
    def absent(self) -> tuple[int, ...]:
        """Shards that do not take part: excluded by the caller, or lost in a refit."""
        return tuple(sorted(self._presence.absent))

    @property
    def membership(self) -> Membership | None:
        """What groups and plan are built for; None if they must be built."""
        return self._tracker.built

    @property
    def plan(self) -> Plan | None:
        """The current plan."""
        return self._plan

    @property
    def wanted(self) -> tuple[QuantSpec, ...]:
        """What engines of the current plan want quantized by the trainer; empty if nothing."""
        return self._wanted

    # --- set-up ---------------------------------------------------------------------------------

    def init_communicator(self, absent: Sequence[int] = ()) -> Membership:
        """Records, plans and connects; no weight is touched.

        Args:
            absent: Shards that do not take part.

        Raises:
            CoverageError: If names, shapes or dtypes of trainer and engine do not match.
            QuantizationError: If trainers cannot quantize as engines want it.
            WeightSyncError: Naming who failed and what to do.
        """
        self._require_open()
        self._exclude(absent)
        return self._build(Deadline(self._seconds))

    def replace_shard(self, index: int, shard: EngineShard) -> None:
        """Puts a new engine in the place of a lost one; the next refit takes it in.

        It is paused at once, so that it serves nothing before it has the current version.

        Raises:
            ConfigError: If it has another number of workers than the fleet, or does not exist.
            WeightSyncError: If it could not be paused.
        """
        self._require_open()
        fleet = self._shards.all
        if not 0 <= index < len(fleet) or shard.workers != fleet[index].workers:
            raise ConfigError(
                f"shard {index} with {shard.workers} workers does not fit a fleet of {len(fleet)} "
                f"shards with {fleet[0].workers} workers each"
            )
        self._shards.replace(index, shard)
        self._tracker.invalidate()
        self._controls.forget(index)
        self._shard_versions[index] = -1
        self._torn.add(index)
        self._presence.restore(index)
        deadline = Deadline(min(self._seconds, _FAREWELL_SECONDS))
        raise_shards(self._shards.apply([index], lambda s: s.pause(), deadline, "pause")[1])

    def _build(self, deadline: Deadline) -> Membership:
        self._stage_name = "plan"
        self._tracker.invalidate()
        start = time.perf_counter()
        self._meet(self._tracker.desired(self._presence.absent).shards, deadline)
        offered = self._trainers.manifests(deadline)
        self._tracker.overtake(self._trainers.epoch)
        membership = self._tracker.begin_build(self._presence.absent)
        manifests, self._wanted = negotiate(
            self._trainers, offered, self._shards, membership, deadline
        )
        recorded = record(self._shards, membership, manifests, self._not_trained, deadline)
        plan = make_plan(
            self._trainers,
            membership,
            manifests,
            recorded,
            self._bucket_bytes,
            self._not_trained,
            deadline,
        )
        self._plan_seconds = time.perf_counter() - start
        self._stage_name = "connect"
        attached = attach(
            self._shards, self._trainers, plan, self._transport, self._controls, deadline
        )
        self._connect(plan, manifests, attached, deadline)
        self._plan = plan
        self._replicas_checked = False
        self._tracker.finish_build(membership)
        return membership

    def _meet(self, present: Sequence[int], deadline: Deadline) -> None:
        """Learns what workers hold already, so that neither versions nor epochs go backwards."""
        for shard, states in meet(self._shards, present, deadline).items():
            if any(state.torn for state in states) or len({s.version for s in states}) > 1:
                self._torn.add(shard)
            if shard not in self._torn:
                self._shard_versions[shard] = min(state.version for state in states)
            self._tracker.overtake(max(state.epoch for state in states))

    def _connect(
        self,
        plan: Plan,
        manifests: Sequence[Manifest],
        attached: Sequence[Attached],
        deadline: Deadline,
    ) -> None:
        # Everybody left earlier groups when the new plan came.
        if self._conductor is not None:
            self._conductor.close()
            self._conductor = None
        if self._transport in GROUPED:
            self._conductor = Conductor(
                self._transport,
                plan,
                manifests,
                self._trainers.infos,
                attached,
                self._stage_bytes,
                deadline,
            )

    # --- refit ----------------------------------------------------------------------------------

    def sync_weights(
        self,
        version: int,
        *,
        verify: bool = True,
        deadline_s: float | None = None,
        absent: Sequence[int] | None = None,
    ) -> RefitReport:
        """Installs the trainer's weights of ``version`` in every present shard.

        Every trainer rank must publish the version, before this call or while it runs. When it
        returns, trainers may change their weights again.

        Args:
            version: Grows with every call, and past every version that engines hold.
            verify: Compare digests of every tensor on every worker before the version counts.
                Shards that may hold mixed weights are verified in any case.
            deadline_s: Longest time the refit may take, with a retry if there is one.
            absent: Shards that do not take part, from now on; None leaves that as it is. Shards
                that a refit loses are absent until a call leaves them out here, or they are
                replaced.

        Raises:
            RefitError: Naming stage, version, epoch and ranks. If live bytes may have changed,
                :attr:`is_stale` stays true and affected shards stay paused.
        """
        begin = time.perf_counter()
        self._require_open()
        self._require_newer(version)
        deadline = Deadline(self._seconds if deadline_s is None else deadline_s)
        if absent is not None:
            self._exclude(absent)
        error, overtaken = "", False
        # Nobody waits longer to clean up after a call than for the call itself.
        self._patience = min(self._silence, _FAREWELL_SECONDS, max(deadline.seconds, 1.0))
        try:
            with Progress(f"refit v{version}", STAGES) as progress:
                report = self._with_survivors(version, verify, deadline, progress)
        except BaseException as problem:
            error = str(problem) or type(problem).__name__
            overtaken = isinstance(problem, StaleEpochError)
            raise
        finally:
            ended = time.perf_counter()
            # Trainers that somebody else drives must not hear of this refit's end.
            untold = {} if overtaken else self._release(version, error)
            if not error:
                raise_first(untold)
        now = time.perf_counter()
        return structs.replace(
            report, seconds=report.seconds | {"release": now - ended}, total_seconds=now - begin
        )

    def _release(self, version: int, error: str) -> dict[str, WeightSyncError]:
        farewell = Deadline(self._patience)
        epoch, missing = self._tracker.epoch, self._missing.names
        return self._trainers.release(version, epoch, error, farewell, missing)

    def _exclude(self, absent: Collection[int]) -> None:
        # Raises if that cannot be, before anything is kept.
        self._tracker.desired(absent)
        self._presence.exclude(absent)

    def _require_newer(self, version: int) -> None:
        newest = max(self._version, *self._shard_versions)
        if version <= newest:
            raise EngineStateError(
                f"version {version} is not newer than {newest}, which engines hold; versions must "
                "grow. A new trainer goes on with a higher number."
            )

    def _with_survivors(
        self, version: int, verify: bool, deadline: Deadline, progress: Progress
    ) -> RefitReport:
        """Tries, and once more without the lost if that can help."""
        self._missing = Missing()
        first: Exception | None = None
        while True:
            attempt = deadline.sooner(deadline.seconds)
            vigil = Vigil(self._addresses, self._silence, attempt)
            self._shards.gone.clear()
            try:
                with vigil:
                    report = self._attempt(version, verify, attempt, progress, first is None)
            except Exception as error:
                failed, again = self._give_up(error, version, vigil.frozen)
            except BaseException as error:
                self._give_up(RuntimeError(repr(error)), version, vigil.frozen)
                raise
            else:
                return structs.replace(
                    report, absent=self.absent, retried="" if first is None else str(first)
                )
            if first is not None:
                first.add_note(f"the retry over the survivors failed as well: {failed}")
                raise first
            if not again or deadline.expired:
                raise failed
            first = failed

    def _addresses(self) -> dict[str, Address]:
        """Where everybody answers who is known to."""
        controls = dict(self._controls.addresses)
        return self._trainers.addresses | {name: at for name, (at, _) in controls.items()}

    def _give_up(
        self, error: Exception, version: int, frozen: Collection[str]
    ) -> tuple[Exception, bool]:
        """Ends what others still do for a failed attempt and finds out who is missing.

        Returns:
            What to raise, and whether the survivors may try again.
        """
        self._tracker.invalidate()
        self._trainers.reconnect()
        epoch = self._tracker.epoch
        if isinstance(error, StaleEpochError):
            # Somebody else drives the fleet now: nothing here may be ended, nobody is missing.
            return explain(error, Missing(), self._stage_name, version, epoch, ()), False
        seconds = self._patience
        stock = take_stock(
            self._trainers.addresses,
            self._controls.addresses,
            epoch,
            frozen,
            f"the refit of version {version} failed: {error}",
            seconds,
        )
        self._missing = stock.missing
        lost = shards_of(stock.missing.names) | self._shards.still_gone(stock.reached, seconds)
        lost -= self._presence.absent
        self._presence.lose(lost)
        again = self._retry_survivors and worth_retrying(error, stock.missing, lost)
        if len(self._presence.absent) == len(self._shards.all):
            # Without anybody left there is nothing to retry; the next call asks everybody again.
            self._presence.find_lost()
            again = False
        return explain(error, stock.missing, self._stage_name, version, epoch, self._torn), again

    def _attempt(
        self, version: int, verify: bool, deadline: Deadline, progress: Progress, first: bool
    ) -> RefitReport:
        if self._tracker.needs_build(self._presence.absent):
            progress.stage("plan")
            self._build(deadline)
            if first:
                self._require_newer(version)
        plan = self._plan
        assert plan is not None
        return self._refit(plan, version, verify, deadline, progress)

    def _refit(
        self, plan: Plan, version: int, verify: bool, deadline: Deadline, progress: Progress
    ) -> RefitReport:
        def stage(name: str) -> None:
            self._stage_name = name
            progress.stage(name)

        begin = time.perf_counter()
        present = plan.membership.shards
        epoch = plan.membership.epoch
        verify = verify or not self._torn.isdisjoint(present)
        stage("publish")
        # Both at once; what engines say counts first, since trainers may take long to publish.
        with self._trainers.awaiting(version, epoch, deadline, verify=verify) as published:
            require_awake(self._shards, present, version, epoch, deadline)
            published()
        if verify and not self._replicas_checked:
            check_replicas(plan, self._trainers, version, deadline)
            self._replicas_checked = True
        spent = {"publish": time.perf_counter() - begin}
        feed = None
        if self._conductor is not None:
            stage("transfer")
            spent.update(self._conductor.stage(version, verify, deadline))
            if self._conductor.later_rounds:
                feed = partial(self._conductor.send_later, version)
        if time.perf_counter() - begin > SURE_SECONDS:
            require_awake(self._shards, present, version, epoch, deadline)
        outcome = commit_version(
            self._shards,
            plan,
            version,
            verify=verify,
            deadline=deadline,
            generations=tuple(peer.generation for peer in self._trainers.peers),
            first_byte=partial(self._mark_stale, present),
            stage=stage,
            feed=feed,
            stale=frozenset(self._torn),
        )
        for shard in outcome.committed:
            self._shard_versions[shard] = version
            self._torn.discard(shard)
        raise_shards(outcome.errors)
        self._version = version
        self._stale = False
        for name, took in outcome.seconds.items():
            spent[name] = spent.get(name, 0.0) + took
        if self._plan_seconds:
            spent["plan"], self._plan_seconds = self._plan_seconds, 0.0
        total = time.perf_counter() - begin
        return report_of(outcome, plan, version, self._transport, spent, total)

    def _mark_stale(self, shards: Sequence[int]) -> None:
        """Right before live bytes change: until they commit, these may hold mixed weights."""
        self._stale = True
        self._torn.update(shards)
        for shard in shards:
            self._shard_versions[shard] = -1

    def _require_open(self) -> None:
        if self._closed:
            raise EngineStateError("the synchronizer was shut down; make a new one")

    def __enter__(self) -> WeightSynchronizer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Detaches workers and closes connections; safe twice."""
        if self._closed:
            return
        self._closed = True
        built = self._tracker.built
        if built is not None:
            self._shards.ask(
                dict.fromkeys(built.shards, Detach(built.epoch, "shutdown")),
                Done,
                Deadline(min(self._seconds, _FAREWELL_SECONDS)),
                "shutdown",
            )
        if self._conductor is not None:
            self._conductor.dismiss()
            self._conductor.close()
        self._trainers.close()
