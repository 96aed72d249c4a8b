"""Serves requests of other processes from threads of this one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import zmq

from weight_sync.errors import ConfigError
from weight_sync.wire.address import Address, PrivateDirectory

# How long handing a reply to the serving thread may take.
_NOTIFY_MILLISECONDS = 5000
# Requests that may wait for something else at once; threads exist only once they are needed.
_WAITING = 64

Handler = Callable[[bytes], bytes]


class Server:
    """A ROUTER socket whose requests run on a few threads, and those that wait on more.

    Args:
        handler: Turns a request into a reply; it must not raise, an exception closes nothing but
            leaves that client waiting until its deadline.
        host: Address to listen on over TCP with CURVE; None listens on a private Unix socket.
        threads: Requests that may run at once.
        waits: Whether a request waits for others, e.g. for a version to be published, for a lock
            or for a transfer. Such requests run on threads of their own, so that however many
            callers gave up on theirs, what can be answered at once is. It must not raise.
        at_once: The reply to a request that takes no time and waits for nothing at all, not even
            for a device or a lock that is held for long; None for any other. It runs on the thread
            that serves the socket, which saves handing the request to another one and back. It
            must not raise.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        host: str | None = None,
        threads: int = 4,
        waits: Callable[[bytes], bool] = lambda request: False,
        at_once: Callable[[bytes], bytes | None] = lambda request: None,
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._directory: PrivateDirectory | None = None
        key = ""
        if host is None:
            self._directory = PrivateDirectory()
            url = self._directory.socket_url()
            self._socket.bind(url)
        else:
            if not zmq.has("curve"):
                raise ConfigError("this pyzmq has no CURVE support; install the wheel from PyPI")
            public, secret = zmq.curve_keypair()
            self._socket.curve_secretkey = secret
            self._socket.curve_publickey = public
            self._socket.curve_server = True
            port = self._socket.bind_to_random_port(f"tcp://{host}")
            url, key = f"tcp://{host}:{port}", public.decode()
        self.address = Address(url, key)
        self._wake_url = f"inproc://wake-{id(self)}"
        self._wake = self._context.socket(zmq.PULL)
        self._wake.bind(self._wake_url)
        self._local = threading.local()
        self._handler = handler
        self._closed = threading.Event()
        self._waits, self._at_once = waits, at_once
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="weight-sync-serve")
        self._waiting = ThreadPoolExecutor(_WAITING, thread_name_prefix="weight-sync-wait")
        self._thread = threading.Thread(target=self._serve, name="weight-sync-server", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        while not self._closed.is_set():
            ready = dict(poller.poll(1000))
            if self._wake in ready:
                parts = self._wake.recv_multipart()
                if len(parts) == 3:
                    self._socket.send_multipart(parts)
            if self._socket in ready:
                parts = self._socket.recv_multipart()
                if len(parts) == 3:
                    self._answer(*parts)
        self._socket.close(0)
        self._wake.close(0)

    def _answer(self, client: bytes, number: bytes, request: bytes) -> None:
        # An empty request asks whether this process runs; busy workers must not delay that.
        reply = self._at_once(request) if request else request
        if reply is not None:
            self._socket.send_multipart([client, number, reply])
        else:
            pool = self._waiting if self._waits(request) else self._pool
            pool.submit(self._run, client, number, request)

    def _run(self, client: bytes, number: bytes, request: bytes) -> None:
        reply = self._handler(request)
        if not self._closed.is_set():
            self._notify([client, number, reply])

    def _notify(self, parts: list[bytes], flags: int = 0) -> None:
        # Sockets belong to one thread; replies travel to the serving thread over inproc.
        push = getattr(self._local, "push", None)
        if push is None:
            push = self._context.socket(zmq.PUSH)
            push.setsockopt(zmq.LINGER, 0)
            push.setsockopt(zmq.SNDTIMEO, _NOTIFY_MILLISECONDS)
            push.connect(self._wake_url)
            self._local.push = push
        # The serving thread may have seen that the server is closed, and be gone.
        with suppress(zmq.Again):
            push.send_multipart(parts, flags)

    def close(self) -> None:
        """Stops serving and removes the socket; safe twice."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._notify([b""], zmq.NOBLOCK)  # Wakes the serving thread.
        for pool in (self._pool, self._waiting):
            pool.shutdown(wait=False, cancel_futures=True)
        self._thread.join(timeout=5)
        self._context.destroy(linger=0)
        if self._directory is not None:
            self._directory.close()
