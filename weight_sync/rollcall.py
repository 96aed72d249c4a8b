"""Finds out which participants run: dead ones refuse a connection, frozen ones do not answer one.

Endpoints answer an empty request on the thread that serves their socket, so a busy participant
answers at once. A stopped process, or one stuck with Python's lock held, lets the kernel accept the
connection and then stays silent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from weight_sync import threads
from weight_sync.comm.deadline import Deadline
from weight_sync.wire.address import Address

_SLICE_SECONDS = 0.05
_REFUSED = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True)
class Missing:
    """Who did not answer.

    Attributes:
        dead: Participants whose address refuses connections.
        frozen: Participants that can be connected to but do not answer.
    """

    dead: frozenset[str] = frozenset()
    frozen: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str]:
        """Both."""
        return self.dead | self.frozen


def roll_call(
    addresses: Mapping[str, Address],
    seconds: float,
    tell: bytes = b"",
    stop: threading.Event | None = None,
) -> Missing:
    """Asks everybody at once whether they run, over connections of its own.

    Args:
        addresses: Participant -> where it listens.
        seconds: How long a participant may take to answer before it counts as frozen.
        tell: A request that is sent before the question; its reply is not waited for.
        stop: Ends the call early; who did not answer until then is not missing.
    """
    context = zmq.Context()
    # What cannot be delivered to the dead must not keep anybody.
    context.linger = 0
    try:
        return _ask(context, addresses, seconds, tell, stop or threading.Event())
    finally:
        context.destroy(linger=0)


def _ask(
    context: zmq.Context[zmq.Socket[bytes]],
    addresses: Mapping[str, Address],
    seconds: float,
    tell: bytes,
    stop: threading.Event,
) -> Missing:
    poller = zmq.Poller()
    who: dict[object, str] = {}
    monitors: dict[object, str] = {}
    for name, address in addresses.items():
        socket = context.socket(zmq.DEALER)
        if address.server_key:
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
            socket.curve_serverkey = address.server_key.encode()
        monitor = socket.get_monitor_socket(_REFUSED)
        who[socket], monitors[monitor] = name, name
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        socket.connect(address.url)
        if tell:
            socket.send_multipart([b"t", tell])
        socket.send_multipart([b"?", b""])
    waiting, dead = set(addresses), set()
    end = time.monotonic() + seconds
    while waiting and not stop.is_set() and time.monotonic() < end:
        for ready, _ in poller.poll(int(_SLICE_SECONDS * 1000)):
            if ready in who:
                # Nothing is awaited but the echo; the reply to ``tell`` may come first.
                if ready.recv_multipart()[0] == b"?":
                    waiting.discard(who[ready])
            else:
                recv_monitor_message(ready)
                if monitors[ready] in waiting:
                    waiting.discard(monitors[ready])
                    dead.add(monitors[ready])
    return Missing(frozenset(dead), frozenset() if stop.is_set() else frozenset(waiting))


class Vigil:
    """Calls the roll again and again while something is awaited, and ends the wait if one froze.

    Args:
        addresses: Says whom to ask; looked at before every call.
        silence_s: Seconds without an answer after which a participant counts as frozen.
        deadline: Of what is awaited; it is ended, because it will not come.

    Attributes:
        frozen: Who froze.
    """

    def __init__(
        self, addresses: Callable[[], Mapping[str, Address]], silence_s: float, deadline: Deadline
    ) -> None:
        self.frozen: frozenset[str] = frozenset()
        self._addresses = addresses
        self._silence = silence_s
        self._deadline = deadline
        self._stop = threading.Event()
        # Held while the roll is called: only then is there something to wait for at the end.
        self._calling = threading.Lock()

    def _run(self) -> None:
        # A refit usually ends before anyone could be called frozen.
        while not self._stop.wait(self._silence / 2):
            with self._calling:
                if self._stop.is_set():
                    return
                missing = roll_call(self._addresses(), self._silence, stop=self._stop)
                if missing.frozen and not self._stop.is_set():
                    self.frozen = missing.frozen
                    self._deadline.end()
                    return

    def __enter__(self) -> Vigil:
        threads.start("weight-sync-vigil", self._run)
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._calling.acquire(timeout=self._silence + 1.0):
            self._calling.release()
