"""The engine worker's part of a refit: records, attaches to a plan, installs versions.

One agent lives in every worker. It is driven by encoded requests and always answers with an encoded
reply; it never raises, because an engine's RPC replies carry no tags and one exception would shift
all later ones.
"""

from __future__ import annotations

import os
import threading
from contextlib import closing, nullcontext

import torch

from weight_sync.errors import EngineStateError, PlanMismatchError, StaleEpochError
from weight_sync.failures import to_failure
from weight_sync.faults import FaultHook, no_fault
from weight_sync.identity import device_identity, host_identity
from weight_sync.manifest import TensorSpec
from weight_sync.messages import (
    Attach,
    Attached,
    Commit,
    Committed,
    Detach,
    Done,
    GetWanted,
    Message,
    Record,
    Recorded,
    Status,
    Wanted,
    WorkerState,
    decode_worker_request,
    encode,
)
from weight_sync.transports.staging import spare_bytes
from weight_sync.worker.install import Stopwatch
from weight_sync.worker.model import EngineModel
from weight_sync.worker.recorded import WorkerRecording, make_recording
from weight_sync.worker.session import U64, Session
from weight_sync.worker.sleep import AlwaysAwake, SleepState, require_weights
from weight_sync.worker.wanted import wanted_names


class WorkerAgent:
    """Answers refit requests for one engine worker.

    Args:
        model: The engine's model.
        rank: The worker's rank in its shard.
        fault: Called with the name of each stage as it starts; for fault injection in tests.
        sleep: Says whether the weights are in memory.
    """

    def __init__(
        self,
        model: EngineModel,
        rank: int = 0,
        fault: FaultHook = no_fault,
        sleep: SleepState | None = None,
    ) -> None:
        self._model = model
        self._sleep: SleepState = AlwaysAwake() if sleep is None else sleep
        self._rank = rank
        self._injected = fault
        self._stage = ""
        self._recorded: WorkerRecording | None = None
        self._session: Session | None = None
        self._version = -1
        self._epoch = -1
        self._torn = False
        self._lock = threading.Lock()

    def handle(self, raw: bytes) -> bytes:
        """Answers one encoded request; never raises."""
        self._stage = "decode"
        try:
            request = decode_worker_request(raw)
            self._stage = type(request).__name__.lower()
            # Callers' threads do other things as well, on whatever device.
            device = self._model.device
            on_device = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
            with self._lock, on_device:
                return encode(self._answer(request))
        except Exception as error:  # Nothing may escape into the engine's RPC.
            return encode(to_failure(error, self._stage))

    def _fault(self, stage: str, offset: int = 0) -> None:
        """Notes what begins, for errors; then whatever a test injected."""
        self._stage = stage
        self._injected(stage, offset)

    def _answer(self, request: Message) -> Message:
        match request:
            case GetWanted(offers):
                self._fault("wanted")
                return Wanted(self._rank, wanted_names(self._model, offers))
            case Record(offers, not_trained):
                return self._record(offers, not_trained)
            case Attach():
                return self._attach(request)
            case Commit():
                return self._commit(request)
            case Detach(epoch, _):
                if epoch >= self._epoch:
                    self._detach()
                return Done()
            case Status():
                return self.state()
            case _:
                raise PlanMismatchError(f"this worker does not know {type(request).__name__}")

    def state(self) -> WorkerState:
        """What the worker knows of itself; from any thread."""
        discarded = self._sleep.discarded
        return WorkerState(
            -1 if discarded else self._version,
            self._torn,
            self._epoch,
            tuple(sorted(self._sleep.asleep)),
            discarded,
        )

    def _record(self, offers: tuple[TensorSpec, ...], not_trained: tuple[str, ...]) -> Recorded:
        self._fault("record")
        require_weights(self._sleep)
        recorded = make_recording(self._model, offers, not_trained)
        self._sleep.recorded(recorded.recording)
        self._recorded = recorded
        index = self._model.device.index or 0
        device = device_identity(index if self._model.device.type == "cuda" else None)
        return Recorded(self._rank, self._recorded.recording, host_identity(), device, os.getpid())

    def _attach(self, request: Attach) -> Attached:
        self._fault("attach")
        if self._recorded is None:
            raise EngineStateError("this worker has no recording; run init_communicator() again")
        if self._rank >= len(request.programs):
            raise PlanMismatchError(
                f"worker {self._rank} got a plan for {len(request.programs)} workers; the shard's "
                "tp * pp and the fleet's workers_per_shard differ"
            )
        program = request.programs[self._rank]
        if program.epoch <= self._epoch:
            raise StaleEpochError(
                f"epoch {program.epoch} was overtaken: this worker was attached in epoch "
                f"{self._epoch}. Build again, with what workers answer to Status."
            )
        self._detach()
        self._epoch = program.epoch
        session = Session(self._model, self._recorded, request, program, self.state, self._fault)
        self._session = session
        return Attached(
            self._rank,
            session.transport.extra_bytes,
            spare_bytes(self._model.device),
            session.address,
        )

    def _commit(self, request: Commit) -> Committed:
        session = self._session
        if session is None:
            raise EngineStateError("this worker is not attached; run init_communicator() again")
        session.check(request.epoch, request.plan_digest)
        if request.version < self._version:
            raise EngineStateError(
                f"version {request.version} is older than {self._version}, which this worker "
                "holds; nothing was changed. A new trainer must go on with a higher number."
            )
        require_weights(self._sleep)
        moved = session.installer.moved()
        if moved:
            raise EngineStateError(
                f"{len(moved)} live tensors moved since the plan was made, e.g. {moved[0]}; "
                "nothing was changed. Run init_communicator() again."
            )
        watch = Stopwatch()
        try:
            self._install(session, request, watch)
        except BaseException as error:
            session.abort(f"the commit failed: {error}")
            raise
        self._torn = False
        self._version = request.version
        self._sleep.installed()
        return Committed(
            self._rank,
            request.version,
            dict(watch.seconds),
            session.installer.bytes_total,
            request.verify,
            session.installer.modes,
        )

    def _install(self, session: Session, request: Commit, watch: Stopwatch) -> None:
        def expected() -> U64:
            self._fault("verify")
            return session.expected()

        self._fault("install")
        with torch.no_grad(), closing(session.deliveries(request)) as deliveries:
            self._torn = True
            session.installer.install(
                deliveries,
                expected if request.verify else _unverified,
                watch,
                request.version,
                request.epoch,
                session.install_stage,
            )
        self._fault("commit")
        # A direct copy cannot move anything: only modules that were processed are looked at again.
        processed = session.installer.modes.keys() - {"direct"}
        gone = session.installer.moved() if processed else []
        if gone:
            raise EngineStateError(f"live tensors moved during the install: {gone[:4]}")

    def abort(self, reason: str) -> None:
        """Ends a running transfer; may be called from any thread."""
        session = self._session
        if session is not None:
            session.abort(reason)

    def _detach(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def _unverified() -> U64 | None:
    return None
