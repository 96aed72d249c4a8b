"""Calls an endpoint of another process; a dead or silent peer becomes a named error."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq
from zmq.utils.monitor import recv_monitor_message

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import AbortedError, DeadlineError, PeerDeadError
from weight_sync.wire.address import Address

# Longest wait between two looks at whether the call was aborted or its deadline was ended early.
_SLICE_SECONDS = 0.1
# How long a call that was aborted may take to notice.
_CLOSE_SECONDS = 5.0


class Client:
    """One DEALER connection; calls are serialized and tagged, late replies are dropped.

    Args:
        address: Where the server listens.
        name: How errors call the other side, e.g. ``"trainer 1"``.
    """

    def __init__(self, address: Address, name: str) -> None:
        self.name = name
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        if address.server_key:
            public, secret = zmq.curve_keypair()
            self._socket.curve_publickey = public
            self._socket.curve_secretkey = secret
            self._socket.curve_serverkey = address.server_key.encode()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        # Left to the collector, a context may be ended before its sockets, which waits for ever.
        self._finalizer = weakref.finalize(self, _close, self._context, self._socket, self._monitor)
        self._socket.connect(address.url)
        self._number = 0
        self._lock = threading.Lock()
        self._dead = False
        self._aborted = ""

    def call(
        self,
        request: bytes,
        deadline: Deadline,
        stage: str,
        version: int | None = None,
        epoch: int | None = None,
    ) -> bytes:
        """Sends a request and waits for its reply.

        Raises:
            PeerDeadError: The connection broke.
            DeadlineError: No reply came in time.
            AbortedError: :meth:`abort` was called.
        """
        with self.begin(request, deadline, stage, version, epoch) as reply:
            return reply()

    @contextmanager
    def begin(
        self,
        request: bytes,
        deadline: Deadline,
        stage: str,
        version: int | None = None,
        epoch: int | None = None,
    ) -> Iterator[Callable[[], bytes]]:
        """Sends a request, so that the caller may do something else before it wants the reply.

        Until the context is left the connection is in use.

        Yields:
            What waits for the reply, once; it raises what :meth:`call` raises.
        """
        # Another thread may be waiting for a reply of the same peer, with another deadline.
        if not self._lock.acquire(timeout=deadline.remaining()):
            raise self._late(deadline, stage, version, epoch)
        try:
            self._number += 1
            tag = self._number.to_bytes(8, "little")
            if self._dead:
                raise self._gone(stage, version, epoch)
            self._socket.send_multipart([tag, request])
            yield lambda: self._await(tag, deadline, stage, version, epoch)
        finally:
            self._lock.release()

    def _await(
        self, tag: bytes, deadline: Deadline, stage: str, version: int | None, epoch: int | None
    ) -> bytes:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        while True:
            wait = min(deadline.remaining(), _SLICE_SECONDS)
            ready = dict(poller.poll(int(wait * 1000) + 1))
            if self._socket in ready:
                number, reply = self._socket.recv_multipart()
                if number == tag:
                    return reply
                continue
            if self._monitor in ready:
                recv_monitor_message(self._monitor)
                self._dead = True
                raise self._gone(stage, version, epoch)
            if self._aborted:
                raise AbortedError(
                    self._aborted, stage=stage, version=version, epoch=epoch, ranks=[self.name]
                )
            if deadline.expired:
                raise self._late(deadline, stage, version, epoch)

    def abort(self, reason: str) -> None:
        """Ends calls that wait, from any thread, and every later one."""
        self._aborted = self._aborted or reason

    def _late(
        self, deadline: Deadline, stage: str, version: int | None, epoch: int | None
    ) -> DeadlineError:
        return DeadlineError(
            f"{self.name} did not answer within {deadline.seconds:g} s",
            stage=stage,
            version=version,
            epoch=epoch,
            ranks=[self.name],
        )

    def _gone(self, stage: str, version: int | None, epoch: int | None) -> PeerDeadError:
        return PeerDeadError(
            f"{self.name} closed its connection; its process has probably died",
            stage=stage,
            version=version,
            epoch=epoch,
            ranks=[self.name],
        )

    def close(self) -> None:
        """Closes the connection, once no other thread uses it; safe twice."""
        self.abort("the connection was closed")
        held = self._lock.acquire(timeout=_CLOSE_SECONDS)
        try:
            self._finalizer()
        finally:
            if held:
                self._lock.release()


def _close(context: zmq.Context[zmq.Socket[bytes]], *sockets: zmq.Socket[bytes]) -> None:
    for socket in sockets:
        socket.close(linger=0)
    context.destroy(linger=0)
