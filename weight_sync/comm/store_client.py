"""Client of the rendezvous store in which no call outlives its deadline."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from weight_sync.comm.deadline import Deadline
from weight_sync.comm.store_wire import (
    HEADER_BYTES,
    Found,
    Hello,
    Put,
    Request,
    Wait,
    body_length,
    decode_reply,
    frame,
)
from weight_sync.errors import DeadlineError, TransportError

#: Pause between attempts to reach a server that does not listen yet, in seconds.
_RETRY_SECONDS = 0.05

#: How much later than asked an answer may come before the server counts as lost, in seconds.
_GRACE_SECONDS = 1.0


class StoreClient:
    """One connection to a :class:`~weight_sync.comm.store_server.StoreServer`.

    Calls from several threads take turns. After any failure the connection is closed, since a
    late answer could be taken for that of the next call; later calls fail at once.

    Args:
        host: Address of the server.
        port: Its port.
        token: Its secret.
        deadline: Until when to try to connect.
        fate_key: Key under which the server notes the loss of this connection.

    Raises:
        DeadlineError: Nobody listened before the deadline.
        TransportError: The server refused the token or does not speak this protocol.
    """

    def __init__(
        self,
        host: str,
        port: int,
        token: str,
        deadline: Deadline,
        fate_key: str | None = None,
    ) -> None:
        self._address = f"{host}:{port}"
        self._lock = threading.Lock()
        self._socket = self._dial(host, port, deadline)
        self.local_address: str = self._socket.getsockname()[0]
        self._ask(Hello(token, fate_key), deadline, deadline.remaining())

    def put(
        self,
        key: str,
        value: bytes,
        deadline: Deadline,
        *,
        drop: str | None = None,
        once: bool = False,
    ) -> None:
        """Stores ``value`` under ``key``; see :class:`~weight_sync.comm.store_wire.Put`.

        Raises:
            TransportError: The server is lost or did not answer before the deadline.
        """
        self._ask(Put(key, value, drop, once), deadline, deadline.remaining())

    def wait(
        self,
        keys: Sequence[str],
        deadline: Deadline,
        *,
        seconds: float | None = None,
        unless: str | None = None,
    ) -> dict[str, bytes]:
        """What exists of ``keys`` once all do, or once ``seconds`` or the deadline have passed.

        Args:
            keys: Keys to wait for; none gives what exists under ``unless`` at once.
            deadline: End of the wait, also for a server that does not answer.
            seconds: Longest wait if all goes well; ``None`` means until the deadline.
            unless: Prefix of keys that end the wait early; those found are in the answer.

        Raises:
            TransportError: The server is lost or did not answer before the deadline.
        """
        limit = deadline.remaining()
        request = Wait(tuple(keys), limit if seconds is None else min(seconds, limit), unless)
        return self._ask(request, deadline, limit + _GRACE_SECONDS)

    def interrupt(self) -> None:
        """Makes a call that another thread is in fail now; the client is unusable afterwards."""
        with suppress(OSError):  # Already closed or lost: there is nothing left to interrupt.
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the connection; may be called again."""
        self._socket.close()

    def _dial(self, host: str, port: int, deadline: Deadline) -> socket.socket:
        while True:
            try:
                connection = socket.create_connection(
                    (host, port), timeout=max(deadline.remaining(), 0.001)
                )
            except OSError as error:
                if deadline.remaining() <= _RETRY_SECONDS:
                    raise DeadlineError(
                        f"no rendezvous store answered at {self._address} ({error})",
                        stage="connect",
                        remedy="check that the address can be reached from this host and that "
                        "the process that opened the rendezvous still runs",
                    ) from error
                time.sleep(_RETRY_SECONDS)
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection

    def _ask(self, request: Request, deadline: Deadline, seconds: float) -> dict[str, bytes]:
        """Sends one request and returns the values of its answer within ``seconds``."""
        if not self._lock.acquire(timeout=max(deadline.remaining(), 0.001)):
            raise TransportError(
                f"the rendezvous store at {self._address} is busy with another call of this "
                f"process, which did not end within {deadline.seconds:g} s"
            )
        try:
            limit = Deadline(seconds)
            self._socket.settimeout(limit.native().total_seconds())
            self._socket.sendall(frame(request))
            length = body_length(self._receive(HEADER_BYTES, limit))
            reply = decode_reply(self._receive(length, limit))
        except (OSError, TransportError) as error:
            self._socket.close()
            raise TransportError(
                f"the rendezvous store at {self._address} is lost ({error}); the process that "
                "opened it has ended or is frozen: rebuild under a new rendezvous"
            ) from error
        finally:
            self._lock.release()
        if isinstance(reply, Found):
            return reply.values
        self._socket.close()
        raise TransportError(
            f"the rendezvous store at {self._address} refused this process: {reply.reason}; "
            "use the rendezvous that the control plane handed out for this epoch"
        )

    def _receive(self, count: int, limit: Deadline) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            self._socket.settimeout(limit.native().total_seconds())
            part = self._socket.recv(count - len(parts))
            if not part:
                raise ConnectionError("the connection was closed")
            parts += part
        return bytes(parts)
