"""A group of GPU ranks over NCCL through CuPy, with its own stream and no torch process group.

An aborted NCCL operation ends without an error and its stream goes on, so nothing counts as
received before :meth:`NcclCommunicator.synchronize` has seen that the group is still good.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec
import torch

from weight_sync.comm.abortable import Abortable
from weight_sync.comm.attendance import Attendance
from weight_sync.comm.base import check_buffer, check_peer
from weight_sync.comm.bounded import BoundedCall
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.facts import EnvironmentFacts, connection_hints
from weight_sync.comm.joining import join
from weight_sync.comm.nccl_launch import LAUNCHES, LaunchGate, nccl_library
from weight_sync.comm.rendezvous import Rendezvous
from weight_sync.errors import AbortedError, DeadlineError, RefitError

#: Shortest and longest pause between two looks at the stream, in seconds.
_PAUSES = (0.00005, 0.001)

#: Time between two looks at whether a peer died or left, in seconds.
_FATE_SECONDS = 0.25


class _Launched(NamedTuple):
    done: torch.cuda.Event
    waits_for: frozenset[int]
    buffers: tuple[torch.Tensor, ...]


class NcclCommunicator(Abortable):
    """A :class:`~weight_sync.comm.base.Communicator` on one GPU; see :func:`connect_nccl`."""

    def __init__(
        self,
        attendance: Attendance,
        native: Any,  # noqa: ANN401 (CuPy's compiled class has no types)
        device: torch.device,
    ) -> None:
        super().__init__(attendance)
        self.device = device
        self._native = native
        # Before packing of the next bucket, which would otherwise take all of the GPU first.
        self._stream = torch.cuda.Stream(device, priority=-2)
        self._gate = LaunchGate()
        self._launched: deque[_Launched] = deque()
        self._collecting: list[tuple[torch.Tensor, set[int]]] = []
        self._launch_failure: RefitError | None = None

    def send(self, buf: torch.Tensor, peer: int) -> None:
        """Starts a send; see the protocol."""
        check_peer(peer, self.world_size, self.rank)
        self._call("send", buf, peer, {peer})

    def recv(self, buf: torch.Tensor, peer: int) -> None:
        """Starts a receive; see the protocol."""
        check_peer(peer, self.world_size, self.rank)
        self._call("recv", buf, peer, {peer})

    def broadcast(self, buf: torch.Tensor, root: int) -> None:
        """Starts a broadcast; see the protocol."""
        check_peer(root, self.world_size, None)
        others = set(range(self.world_size)) - {self.rank}
        self._call("bcast", buf, root, others if root == self.rank else {root})

    def group_start(self) -> None:
        """Begins a grouped launch; see the protocol."""
        if not self._gate.enter():
            raise AbortedError(self._aborted or "closed", stage="launch", epoch=self.epoch)
        try:
            fresh = LAUNCHES.start(self)
        except BaseException:
            self._gate.leave()
            raise
        if not fresh:
            self._gate.leave()  # The outer level of the same group holds the gate already.

    def group_end(self) -> None:
        """Launches what was collected; see the protocol."""
        with torch.cuda.device(self.device):
            LAUNCHES.end()
        if self._launch_failure is not None:
            raise self._launch_failure

    def launch_ended(self, failure: BaseException | None) -> None:
        """Marks the end of a grouped launch on the stream, or aborts if it is incomplete.

        Called by the launch itself once NCCL's group has ended: NCCL would defer an abort inside
        it, and an event recorded inside it would come before the work.
        """
        collected, self._collecting = self._collecting, []
        if failure is None and collected:
            done = torch.cuda.Event()
            done.record(self._stream)
            waits_for = frozenset().union(*(peers for _, peers in collected))
            buffers = tuple(buf for buf, _ in collected)
            self._launched.append(_Launched(done, waits_for, buffers))
        while len(self._launched) > 1 and self._launched[0].done.query():
            self._launched.popleft()  # Frees the buffers of work that is complete.
        self._gate.leave()
        if failure is not None:
            reason = f"a grouped launch failed: {failure!r}"
            self._launch_failure = self._failure(reason, "launch", None)

    @contextmanager
    def group(self) -> Iterator[None]:
        """A grouped launch; see the protocol."""
        self.group_start()
        try:
            yield
        except BaseException as error:
            LAUNCHES.fail(error)
            with suppress(RefitError):  # It repeats the error that is raised here.
                self.group_end()
            raise
        self.group_end()

    def wait_stream(self, stream: torch.cuda.Stream | None) -> None:
        """Orders later launches after ``stream``; see the protocol."""
        if stream is not None:
            self._stream.wait_stream(stream)

    def release_stream(self, stream: torch.cuda.Stream | None, deadline: Deadline) -> None:
        """Orders ``stream`` after what was launched; see the protocol."""
        if stream is None:
            self.synchronize(deadline)
        elif self._aborted is not None:
            raise AbortedError(self._aborted, stage="transfer", epoch=self.epoch)
        else:
            stream.wait_stream(self._stream)

    def synchronize(
        self, deadline: Deadline, *, stage: str = "transfer", version: int | None = None
    ) -> None:
        """Waits for what was launched; see the protocol."""
        pause, next_look = _PAUSES[0], time.monotonic() + _FATE_SECONDS
        while self._launched and self._aborted is None:
            if self._complete(self._launched[0], stage, version):
                self._launched.popleft()
                continue
            if deadline.expired:
                raise self._too_late(deadline, stage, version)
            if time.monotonic() >= next_look:
                self._look(stage, version)
                next_look = time.monotonic() + _FATE_SECONDS
            time.sleep(pause)
            pause = min(pause * 1.5, _PAUSES[1])
        if self._aborted is not None:
            raise AbortedError(self._aborted, stage=stage, version=version, epoch=self.epoch)

    def _stop(self) -> None:
        self._gate.close()
        self._native.abort()

    def close(self) -> None:
        """Frees the group; see the protocol.

        It aborts rather than destroys: an orderly NCCL destroy waits for peers that may be gone.
        """
        try:
            finished = all(one.done.query() for one in self._launched)
        except RuntimeError:  # The GPU is in error; whatever it was, the work is not done.
            finished = False
        if not finished:
            self.abort("closed with unfinished work")
        self._attendance.close()
        self._end("closed", None)
        self._launched.clear()

    def _call(self, name: str, buf: torch.Tensor, peer: int, waits_for: set[int]) -> None:
        """One NCCL call in a group of its own, or in the one the caller has begun."""
        check_buffer(buf, self.device)
        with self.group():
            if buf.numel() and self.world_size > 1:
                call = getattr(self._native, name)
                uint8 = nccl_library().NCCL_UINT8
                call(buf.data_ptr(), buf.numel(), uint8, peer, self._stream.cuda_stream)
                self._collecting.append((buf, waits_for))

    def _complete(self, launched: _Launched, stage: str, version: int | None) -> bool:
        try:
            return launched.done.query()
        except RuntimeError as error:
            reason = f"the GPU reported an error: {error}"
            raise self._failure(reason, stage, version) from error

    def _look(self, stage: str, version: int | None) -> None:
        """Ends the wait early when NCCL or the store know that it cannot succeed."""
        needed = frozenset().union(*(one.waits_for for one in self._launched))
        gone = needed.intersection(self._attendance.gone())
        if gone:
            error = self._attendance.blame(gone, stage=stage, version=version)
            self._end(str(error), error)
            raise error
        if not self._gate.enter():
            return
        try:
            self._native.check_async_error()
        except Exception as error:  # CuPy raises KeyError for codes it does not know.
            failure: Exception | None = error
        else:
            failure = None
        finally:
            self._gate.leave()
        if failure is not None:
            reason = f"NCCL reported an error: {failure!r}"
            raise self._failure(reason, stage, version) from failure

    def _failure(self, reason: str, stage: str, version: int | None) -> RefitError:
        if self._aborted is not None:
            return AbortedError(self._aborted, stage=stage, version=version, epoch=self.epoch)
        gone = self._attendance.gone()
        if gone:
            error = self._attendance.blame(gone, stage=stage, version=version)
        else:
            error = RefitError(reason, stage=stage, version=version, epoch=self.epoch)
        self._end(str(error), error)
        return error

    def _too_late(self, deadline: Deadline, stage: str, version: int | None) -> RefitError:
        waiting = [one for one in self._launched if not self._complete(one, stage, version)]
        reason = f"bytes did not arrive within {deadline.seconds:g} s"
        peers = frozenset().union(*(one.waits_for for one in waiting))
        names = self._attendance.names

        def late(ranks: Iterable[int]) -> DeadlineError:
            return DeadlineError(
                reason,
                stage=stage,
                version=version,
                epoch=self.epoch,
                ranks=[names[rank] for rank in ranks],
            )

        self._end(f"{reason} at {names[self.rank]}", late(peers))
        return late(self._attendance.late(peers))


def connect_nccl(
    rendezvous: Rendezvous,
    rank: int,
    names: Sequence[str],
    device: torch.device,
    deadline: Deadline,
) -> NcclCommunicator:
    """Builds this rank's end of an NCCL group; every rank of ``names`` must call it.

    Args:
        rendezvous: Where the group meets, the same for all ranks.
        rank: This rank.
        names: Participants by rank, for messages.
        device: GPU with an index; no other rank may use the same one.
        deadline: When to give up.

    Raises:
        DeadlineError: Names the ranks that did not arrive or did not finish NCCL's set-up.
        PeerDeadError: A rank died while the group was built.
        AbortedError: A rank gave up while the group was built.
        EnvironmentUnsupportedError: CuPy's NCCL is missing, ranks differ in NCCL version or
            settings, or two ranks share a GPU.
        TransportError: The store is lost, or NCCL could not connect.
    """

    def build(attendance: Attendance, facts: Sequence[EnvironmentFacts]) -> NcclCommunicator:
        nccl = nccl_library()
        own = msgspec.msgpack.encode(nccl.get_unique_id()) if rank == 0 else b""
        shared = attendance.arrive("unique_id", deadline, own)[0]
        # Older CuPy hands out a tuple of integers, newer ones bytes; each takes what it gives.
        unique_id = msgspec.msgpack.decode(shared, type=bytes | tuple[int, ...])

        def initialize() -> Any:  # noqa: ANN401 (CuPy's compiled class has no types)
            with torch.cuda.device(device):
                return nccl.NcclCommunicator(len(names), unique_id, rank)

        call = BoundedCall(initialize, lambda late: late.abort(), f"nccl-connect-{rank}")
        if not call.wait(deadline, _raise_if_gone(attendance)):
            attendance.leave("NCCL did not connect before the deadline")
            late = attendance.late(set(range(len(names))) - {rank})
            raise DeadlineError(
                f"all ranks were present but NCCL did not connect within {deadline.seconds:g} s",
                stage="connect",
                epoch=rendezvous.epoch,
                ranks=[names[one] for one in late],
                remedy=connection_hints(facts),
            )
        return NcclCommunicator(attendance, call.result, device)

    return join(rendezvous, rank, names, device, deadline, build)


def _raise_if_gone(attendance: Attendance) -> Callable[[], None]:
    def look() -> None:
        gone = attendance.gone()
        if gone:
            raise attendance.blame(gone, stage="connect")

    return look
