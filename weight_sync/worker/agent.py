"""The engine worker's part of a refit: records, attaches to a plan, installs versions.

One agent lives in every worker. It is driven by encoded requests and always answers with an encoded
reply; it never raises, because an engine's RPC replies carry no tags and one exception would shift all
later ones.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import EngineStateError, PlanMismatchError, RefitError
from weight_sync.identity import device_identity, host_identity
from weight_sync.manifest import TensorSpec
from weight_sync.messages import (
    Attach,
    Attached,
    Commit,
    Committed,
    Detach,
    Digests,
    Done,
    GetDigests,
    Message,
    Record,
    Recorded,
    Status,
    WorkerState,
    decode_worker_request,
    encode,
    to_failure,
)
from weight_sync.program import ReceiverProgram
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.transports.base import ReceiverTransport
from weight_sync.transports.registry import make_receiver
from weight_sync.worker.install import Installer, Stopwatch
from weight_sync.worker.model import EngineModel
from weight_sync.worker.recorded import WorkerRecording, make_recording

U64 = NDArray[np.uint64]
FaultHook = Callable[[str], None]


def _no_fault(stage: str) -> None:
    return None


class _Session:
    """What one attached plan needs; dropped as a whole when the epoch ends."""

    def __init__(
        self,
        model: EngineModel,
        recorded: WorkerRecording,
        request: Attach,
        program: ReceiverProgram,
    ) -> None:
        self.program = program
        deadline = Deadline(request.seconds)
        senders = set(np.unique(self.program.sender.unpack()).tolist())
        self.peers = {
            t.rank: TrainerPeer(t.rank, t.address) for t in request.trainers if t.rank in senders
        }
        # Digest requests have connections of their own, so that they never wait behind buckets.
        self._hashers = [TrainerPeer(t.rank, t.address) for t in request.trainers]
        self.transport: ReceiverTransport = make_receiver(
            request.transport, model.device, self.peers
        )
        self._pool = ThreadPoolExecutor(
            max(len(self._hashers), 1), thread_name_prefix="weight-sync-digests"
        )
        self._expected: list[Future[Digests]] = []
        try:
            for peer in self.peers.values():
                peer.manifest(deadline)
            self.installer = Installer(model, recorded, self.program)
            self.transport.connect(self.program, request.trainers, deadline)
        except BaseException:
            self.close()
            raise

    def ask_digests(self, version: int, deadline: Deadline) -> None:
        """Lets all senders hash while bytes travel."""
        program = self.program
        request = GetDigests(program.epoch, program.plan_digest, version, program.class_id)
        self._expected = [
            self._pool.submit(
                peer.call, request, Digests, deadline, "verify", version, program.epoch
            )
            for peer in self._hashers
        ]

    def expected(self) -> U64:
        """Sum of what all senders hashed, per digest slot."""
        total: U64 | None = None
        for future in self._expected:
            values = future.result().values.unpack().astype(np.uint64)
            if len(values):
                total = values if total is None else total + values
        if total is None:
            raise RefitError("no trainer rank sent digests", stage="verify")
        return total

    def close(self) -> None:
        self.transport.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for peer in [*self.peers.values(), *self._hashers]:
            peer.close()


class WorkerAgent:
    """Answers refit requests for one engine worker.

    Args:
        model: The engine's model.
        rank: The worker's rank in its shard.
        fault: Called with the name of each stage as it starts; for fault injection in tests.
    """

    def __init__(self, model: EngineModel, rank: int = 0, fault: FaultHook = _no_fault) -> None:
        self._model = model
        self._rank = rank
        self._fault = fault
        self._recorded: WorkerRecording | None = None
        self._session: _Session | None = None
        self._version = -1
        self._torn = False
        self._lock = threading.Lock()

    def handle(self, raw: bytes) -> bytes:
        """Answers one encoded request; never raises."""
        stage = "decode"
        try:
            request = decode_worker_request(raw)
            stage = type(request).__name__.lower()
            with self._lock:
                return encode(self._answer(request))
        except Exception as error:  # Nothing may escape into the engine's RPC.
            return encode(to_failure(error, stage, torn=self._torn))

    def _answer(self, request: Message) -> Message:
        match request:
            case Record(offers, not_trained):
                return self._record(offers, not_trained)
            case Attach():
                return self._attach(request)
            case Commit():
                return self._commit(request)
            case Detach():
                self._detach()
                return Done()
            case Status():
                epoch = self._session.program.epoch if self._session else -1
                return WorkerState(self._version, self._torn, epoch)
            case _:
                raise PlanMismatchError(f"this worker does not know {type(request).__name__}")

    def _record(self, offers: tuple[TensorSpec, ...], not_trained: tuple[str, ...]) -> Recorded:
        self._fault("record")
        self._recorded = make_recording(self._model, offers, not_trained)
        index = self._model.device.index or 0
        device = device_identity(index if self._model.device.type == "cuda" else None)
        return Recorded(self._rank, self._recorded.recording, host_identity(), device, os.getpid())

    def _attach(self, request: Attach) -> Attached:
        self._fault("attach")
        if self._recorded is None:
            raise EngineStateError("this worker has no recording; run init_communicator() again")
        self._detach()
        if self._rank >= len(request.programs):
            raise PlanMismatchError(
                f"worker {self._rank} got a plan for {len(request.programs)} workers; the shard's "
                "tp * pp and the fleet's workers_per_shard differ"
            )
        self._session = _Session(self._model, self._recorded, request, request.programs[self._rank])
        return Attached(self._rank, self._session.transport.extra_bytes)

    def _commit(self, request: Commit) -> Committed:
        session = self._session
        if session is None:
            raise EngineStateError("this worker is not attached; run init_communicator() again")
        program = session.program
        if (program.epoch, program.plan_digest) != (request.epoch, request.plan_digest):
            raise PlanMismatchError(
                f"this worker holds epoch {program.epoch}, plan {program.plan_digest}, but epoch "
                f"{request.epoch}, plan {request.plan_digest} is to be committed; nothing was changed"
            )
        moved = session.installer.moved()
        if moved:
            raise EngineStateError(
                f"{len(moved)} live tensors moved since the plan was made, e.g. {moved[0]}; nothing "
                "was changed. Run init_communicator() again."
            )
        deadline = Deadline(request.seconds)
        watch = Stopwatch()
        self._fault("transfer")
        if request.verify:
            session.ask_digests(request.version, deadline)
        for rank, peer in session.peers.items():
            peer.generation = request.generations[rank]
        self._torn = True
        with torch.no_grad():
            session.installer.install(
                session.transport.transfer(request.version, deadline),
                session.expected if request.verify else _unverified,
                watch,
                request.version,
                request.epoch,
            )
        self._fault("commit")
        modes = session.installer.modes()
        # A direct copy cannot move anything, so only modules that were processed are looked at again.
        gone = session.installer.moved() if set(modes) - {"direct"} else []
        if gone:
            raise EngineStateError(f"live tensors moved during the install: {gone[:4]}")
        self._torn = False
        self._version = request.version
        return Committed(
            self._rank,
            request.version,
            dict(watch.seconds),
            session.installer.bytes_total,
            request.verify,
            modes,
        )

    def abort(self, reason: str) -> None:
        """Ends a running transfer; may be called from any thread."""
        session = self._session
        if session is not None:
            session.transport.abort(reason)

    def _detach(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def _unverified() -> U64 | None:
    return None
