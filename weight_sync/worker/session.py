"""What one attached plan needs in a worker; dropped as a whole when the epoch ends."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import PlanMismatchError, RefitError, StaleEpochError
from weight_sync.faults import FaultHook, no_fault
from weight_sync.messages import (
    Attach,
    Commit,
    Digests,
    GetDigests,
    Joined,
    JoinGroups,
    StageVersion,
    VersionStaged,
    WorkerState,
)
from weight_sync.program import ReceiverProgram
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.transports.base import Delivery, ReceiverTransport
from weight_sync.transports.registry import make_receiver
from weight_sync.transports.staging import StagedReceiver
from weight_sync.wire.address import Address, host_towards
from weight_sync.worker.control import ControlServer
from weight_sync.worker.install import Installer, Stopwatch
from weight_sync.worker.model import EngineModel
from weight_sync.worker.recorded import WorkerRecording

U64 = NDArray[np.uint64]


class Session:
    """One attached plan.

    Args:
        model: The engine's model.
        recorded: The worker's recording.
        request: What the worker was attached with.
        program: The worker's own part of it.
        state: Answers status requests.
        fault: For fault injection in tests.
    """

    def __init__(
        self,
        model: EngineModel,
        recorded: WorkerRecording,
        request: Attach,
        program: ReceiverProgram,
        state: Callable[[], WorkerState],
        fault: FaultHook,
    ) -> None:
        self.program = program
        self.state = state
        self._fault = fault
        deadline = Deadline(request.seconds)
        senders = set(np.unique(program.sender.unpack()).tolist())
        self.peers = {
            t.rank: TrainerPeer(t.rank, t.address) for t in request.trainers if t.rank in senders
        }
        # Digest requests have connections of their own, so that they never wait behind buckets.
        self._hashers = [TrainerPeer(t.rank, t.address) for t in request.trainers]
        self.transport: ReceiverTransport = make_receiver(
            request.transport, model.device, self.peers, fault
        )
        self._pool = ThreadPoolExecutor(
            max(len(self._hashers), 1), thread_name_prefix="weight-sync-digests"
        )
        self._expected: list[Future[Digests]] = []
        self._total: U64 | None = None
        self._control: ControlServer | None = None
        try:
            for peer in self.peers.values():
                peer.manifest(deadline)
            self.installer = Installer(model, recorded, program)
            self.transport.connect(program, request.trainers, deadline)
            host = host_towards(request.trainers[0].address)
            self._control = ControlServer(self, program.epoch, model.device, host)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> Address:
        """Where control requests of this session are answered."""
        assert self._control is not None
        return self._control.address

    def check(self, epoch: int, plan_digest: str) -> None:
        """Refuses requests for another plan.

        Raises:
            StaleEpochError: The request belongs to an epoch that is over.
            PlanMismatchError: Naming both; nothing was changed.
        """
        program = self.program
        if epoch < program.epoch:
            raise StaleEpochError(
                f"a request of epoch {epoch} came after epoch {program.epoch} was built; nothing "
                "was changed. Whoever sent it was replaced, and must build a new epoch to go on."
            )
        if (program.epoch, program.plan_digest) != (epoch, plan_digest):
            raise PlanMismatchError(
                f"this worker holds epoch {program.epoch}, plan {program.plan_digest}, but epoch "
                f"{epoch}, plan {plan_digest} is asked for; nothing was changed"
            )

    # --- control server -------------------------------------------------------------------------

    def join(self, request: JoinGroups) -> Joined:
        """Builds the groups of the epoch."""
        self.check(request.epoch, request.plan_digest)
        return self._staged_transport().join(request)

    def stage(self, request: StageVersion) -> VersionStaged:
        """Receives the first round; verifies it if it is the only one.

        Raises:
            RefitError: If bytes did not come or differ; nothing live was changed, and the groups of
                this process are aborted.
        """
        transport = self._staged_transport()
        self.check(request.epoch, request.plan_digest)
        try:
            deadline = Deadline(request.seconds)
            watch = Stopwatch()
            if request.verify:
                self.ask_digests(request.version, deadline)
            with watch.stage("transfer"):
                delivery = transport.stage(request.version, deadline)
            if request.verify and transport.complete:
                with watch.stage("verify"):
                    self._fault("verify")
                    self.installer.check(delivery, self.expected(), request.version, request.epoch)
        except BaseException as error:
            transport.abort(f"a worker failed: {error}")
            raise
        return VersionStaged(dict(watch.seconds))

    def abort(self, reason: str) -> None:
        """Ends a running transfer and every wait for a trainer, from any thread.

        The worker must be attached again before its next refit.
        """
        for peer in [*self.peers.values(), *self._hashers]:
            peer.abort(reason)
        self.transport.abort(reason)

    def _staged_transport(self) -> StagedReceiver:
        if not isinstance(self.transport, StagedReceiver):
            raise PlanMismatchError("this worker was attached with a transport without groups")
        return self.transport

    # --- commit ---------------------------------------------------------------------------------

    def deliveries(self, request: Commit) -> Generator[Delivery, None, None]:
        """Everything the program needs, from what was staged or from the trainers directly.

        Close it when it is not read to its end: it may hold mappings and a thread.
        """
        deadline = Deadline(request.seconds)
        if not isinstance(self.transport, StagedReceiver):
            if request.verify:
                self.ask_digests(request.version, deadline)
            for rank, peer in self.peers.items():
                peer.generation = request.generations[rank]
            return self._each(self.transport.transfer(request.version, deadline), self._fault)
        return self._each(self.transport.transfer(request.version, deadline), no_fault)

    def _each(
        self, deliveries: Iterator[Delivery], fault: FaultHook
    ) -> Generator[Delivery, None, None]:
        offset = 0
        fault("transfer", offset)
        for delivery in deliveries:
            yield delivery
            offset += self.installer.nbytes(delivery)
            fault("transfer", offset)

    @property
    def install_stage(self) -> str:
        """What reports call the copy into live memory: the transfer, unless bytes are staged."""
        return "commit" if isinstance(self.transport, StagedReceiver) else "transfer"

    def ask_digests(self, version: int, deadline: Deadline) -> None:
        """Lets all senders hash while bytes travel."""
        program = self.program
        request = GetDigests(program.epoch, program.plan_digest, version, program.class_id)
        self._total = None
        self._expected = [
            self._pool.submit(
                peer.call, request, Digests, deadline, "verify", version, program.epoch
            )
            for peer in self._hashers
        ]

    def expected(self) -> U64:
        """Sum of what all senders hashed, per digest slot."""
        # Each is taken out before it is looked at: else its error and this frame would hold each
        # other, and with them all of this session.
        while self._expected:
            values = self._expected.pop().result().values.unpack().astype(np.uint64)
            if len(values):
                self._total = values if self._total is None else self._total + values
        if self._total is None:
            raise RefitError("no trainer rank sent digests", stage="verify")
        return self._total

    def close(self) -> None:
        """Leaves groups, closes connections and frees staging memory; safe twice."""
        self.transport.abort("the worker was detached")
        if self._control is not None:
            self._control.close()
        self.transport.close()
        installer = getattr(self, "installer", None)  # Absent if the constructor failed.
        if installer is not None:
            installer.forget()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for peer in [*self.peers.values(), *self._hashers]:
            peer.close()
