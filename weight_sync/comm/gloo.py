"""A group of CPU ranks over gloo, built without touching torch's default process group.

Four facts about gloo, seen in experiments, shape this file. ``abort()`` does not close connections,
but a receive that times out closes all of the group. A send or receive does not know whether it is
complete until it is waited for. A receive that has begun to fill its buffer does not notice that
its connection is lost and waits for its time-out; so waits run on a thread of their own, which is
left to its time-out when the caller learns of an abort or a loss. Gloo's collectives have the same
flaw on threads that the group must join before it can be freed; so a broadcast is one send to each
peer here.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroupGloo, Work

from weight_sync.comm.abortable import Abortable
from weight_sync.comm.attendance import Attendance
from weight_sync.comm.base import check_buffer, check_peer
from weight_sync.comm.bounded import BoundedCall
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.facts import EnvironmentFacts
from weight_sync.comm.gloo_store import GlooStore
from weight_sync.comm.joining import join
from weight_sync.comm.rendezvous import Rendezvous
from weight_sync.errors import AbortedError, DeadlineError, RefitError

#: torch's type stubs leave out the operations and options of gloo groups.
_Gloo: Any = ProcessGroupGloo

#: Time between two looks at whether a peer died or gave up, in seconds.
_FATE_SECONDS = 0.25

_DATA_TAG = 0
#: Tag on which nobody ever sends: a receive on it can only fail.
_NEVER_TAG = 1


class _Launched(NamedTuple):
    work: Work
    peer: int
    buffer: torch.Tensor


class GlooCommunicator(Abortable):
    """A :class:`~weight_sync.comm.base.Communicator` on the CPU; see :func:`connect_gloo`."""

    def __init__(self, attendance: Attendance, group: Any) -> None:  # noqa: ANN401 (as _Gloo)
        super().__init__(attendance)
        self.device = torch.device("cpu")
        self._group: Any = group
        self._launched: deque[_Launched] = deque()
        self._probes: list[tuple[Work, torch.Tensor]] = []

    def send(self, buf: torch.Tensor, peer: int) -> None:
        """Starts a send; see the protocol."""
        check_peer(peer, self.world_size, self.rank)
        with self._launch(buf) as group:
            if buf.numel():
                work = group.send([buf], peer, _DATA_TAG)
                self._launched.append(_Launched(work, peer, buf))

    def recv(self, buf: torch.Tensor, peer: int) -> None:
        """Starts a receive; see the protocol."""
        check_peer(peer, self.world_size, self.rank)
        with self._launch(buf) as group:
            if buf.numel():
                work = group.recv([buf], peer, _DATA_TAG)
                self._launched.append(_Launched(work, peer, buf))

    def broadcast(self, buf: torch.Tensor, root: int) -> None:
        """Starts a broadcast; see the protocol."""
        check_peer(root, self.world_size, None)
        if root != self.rank:
            self.recv(buf, root)
            return
        for peer in range(self.world_size):
            if peer != self.rank:
                self.send(buf, peer)

    def group_start(self) -> None:
        """Every gloo operation is asynchronous: both directions progress without a group."""

    def group_end(self) -> None:
        """See :meth:`group_start`."""

    @contextmanager
    def group(self) -> Iterator[None]:
        """A grouped launch; see the protocol."""
        try:
            yield
        except BaseException as error:
            self.abort(f"a grouped launch failed: {error}")
            raise

    def wait_stream(self, stream: torch.cuda.Stream | None) -> None:
        """The CPU has no streams: buffers are ready when they are handed over."""

    def release_stream(self, stream: torch.cuda.Stream | None, deadline: Deadline) -> None:
        """Waits for what was launched; see the protocol."""
        self.synchronize(deadline)

    def synchronize(
        self, deadline: Deadline, *, stage: str = "transfer", version: int | None = None
    ) -> None:
        """Waits for what was launched; see the protocol."""
        next_look = time.monotonic() + _FATE_SECONDS

        def look() -> None:
            nonlocal next_look
            if self._aborted is not None:
                raise AbortedError(self._aborted, stage=stage, version=version, epoch=self.epoch)
            if time.monotonic() >= next_look:
                next_look = time.monotonic() + _FATE_SECONDS
                gone = self._gone()
                if gone:
                    error = self._attendance.blame(gone, stage=stage, version=version)
                    self._end(str(error), error)
                    raise error

        look()
        if self._launched:
            call = BoundedCall(lambda: self._wait_all(deadline), lambda _: None, "gloo-wait")
            try:
                in_time = call.wait(deadline, look)
            except RuntimeError as error:
                raise self._failure(str(error), deadline, stage, version) from error
            if not in_time:
                raise self._failure("the deadline passed", deadline, stage, version)
        look()

    def _stop(self) -> None:
        self._close_connections()

    def close(self) -> None:
        """Frees the group; see the protocol."""
        if self._launched:
            self.abort("closed with unfinished work")
        with self._abort_lock:
            if self._aborted is None:
                self._aborted = "closed"
            self._attendance.close()
            self._launched.clear()
            self._probes.clear()
            self._group = None

    @contextmanager
    def _launch(self, buf: torch.Tensor) -> Iterator[Any]:
        """The group to launch on; turns errors of the launch into named ones."""
        check_buffer(buf, self.device)
        group = self._group
        if self._aborted is not None or group is None:
            raise AbortedError(self._aborted or "closed", stage="launch", epoch=self.epoch)
        try:
            yield group
        except RuntimeError as error:
            raise self._failure(str(error), None, "launch", None) from error

    def _failure(
        self,
        cause: str,
        deadline: Deadline | None,
        stage: str,
        version: int | None,
    ) -> RefitError:
        """Aborts after a failed operation and says which peers it was about."""
        with self._abort_lock:
            if self._aborted is not None:
                return AbortedError(self._aborted, stage=stage, version=version, epoch=self.epoch)
            # A wait that timed out has closed all connections, so they no longer tell anything.
            timed_out = deadline is not None and deadline.expired
            closed = self._close_connections() if not timed_out else set()
        error: RefitError
        closed = closed or self._gone()
        if closed:
            error = self._attendance.blame(closed, stage=stage, version=version)
        elif deadline is not None and timed_out:
            unfinished = self._unfinished()
            reason = f"bytes did not arrive within {deadline.seconds:g} s"
            names = self._attendance.names

            def late(ranks: Iterable[int]) -> DeadlineError:
                return DeadlineError(
                    reason,
                    stage=stage,
                    version=version,
                    epoch=self.epoch,
                    ranks=[names[rank] for rank in ranks],
                )

            # The note comes first, so that others who wait do not count this rank as silent.
            self._end(f"{reason} at {names[self.rank]}", late(unfinished))
            error = late(self._attendance.late(unfinished))
        else:
            error = RefitError(
                f"gloo failed: {cause}", stage=stage, version=version, epoch=self.epoch
            )
        self._end(str(error), error)
        return error

    def _wait_all(self, deadline: Deadline) -> None:
        """Waits for each operation in turn; on a thread of its own, see the top of this file."""
        while self._launched and self._aborted is None:
            first = self._launched[0]
            first.work.wait(deadline.native())
            if self._launched and self._launched[0] is first:  # Else the group was closed.
                self._launched.popleft()

    def _gone(self) -> set[int]:
        """Peers of unfinished operations that died or gave up."""
        return {one.peer for one in tuple(self._launched)}.intersection(self._attendance.gone())

    def _unfinished(self) -> set[int]:
        """Peers of the operations that did not complete, the first of which is waited for."""
        launched = tuple(self._launched)
        peers = {one.peer for one in launched[:1]}
        for one in launched[1:]:
            try:
                one.work.wait(timedelta(milliseconds=1))
            except RuntimeError:
                peers.add(one.peer)
        return peers

    def _close_connections(self) -> set[int]:
        """Ends all waits of this group; returns the peers that had closed theirs before."""
        closed: set[int] = set()
        if self._group is None:
            return closed
        for peer in range(self.world_size):
            if peer == self.rank:
                continue
            buf = torch.empty(1, dtype=torch.uint8)
            try:
                self._probes.append((self._group.recv([buf], peer, _NEVER_TAG), buf))
            except RuntimeError:
                closed.add(peer)
        for work, _ in self._probes[-1:]:
            # The time-out is the purpose: it closes every connection of the group.
            with suppress(RuntimeError):
                work.wait(timedelta(milliseconds=1))
        return closed


def connect_gloo(
    rendezvous: Rendezvous, rank: int, names: Sequence[str], deadline: Deadline
) -> GlooCommunicator:
    """Builds this rank's end of a gloo group; every rank of ``names`` must call it.

    Args:
        rendezvous: Where the group meets, the same for all ranks.
        rank: This rank.
        names: Participants by rank, for messages.
        deadline: When to give up.

    Raises:
        DeadlineError: Names the ranks that did not arrive.
        PeerDeadError: A rank died while the group was built.
        AbortedError: A rank gave up while the group was built.
        EnvironmentUnsupportedError: The ranks are not all on the CPU.
        TransportError: The store is lost, or gloo could not connect.
    """

    def build(attendance: Attendance, facts: Sequence[EnvironmentFacts]) -> GlooCommunicator:
        options = _Gloo._Options()
        # The address that reaches the store is one that the other participants can reach.
        options._devices = [_Gloo.create_device(hostname=attendance.local_address)]
        options._timeout = deadline.native()
        options._threads = 1
        group = _Gloo(GlooStore(attendance, deadline), rank, len(names), options)
        return GlooCommunicator(attendance, group)

    return join(rendezvous, rank, names, torch.device("cpu"), deadline, build)
