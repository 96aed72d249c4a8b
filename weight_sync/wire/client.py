"""Calls an endpoint of another process; a dead or silent peer becomes a named error."""

from __future__ import annotations

import threading

import zmq
from zmq.utils.monitor import recv_monitor_message

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import DeadlineError, PeerDeadError
from weight_sync.wire.address import Address


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
        self._socket.connect(address.url)
        self._number = 0
        self._lock = threading.Lock()
        self._dead = False

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
        """
        with self._lock:
            self._number += 1
            tag = self._number.to_bytes(8, "little")
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
            if self._dead:
                raise self._gone(stage, version, epoch)
            self._socket.send_multipart([tag, request])
            while True:
                ready = dict(poller.poll(int(deadline.remaining() * 1000) + 1))
                if self._socket in ready:
                    number, reply = self._socket.recv_multipart()
                    if number == tag:
                        return reply
                    continue
                if self._monitor in ready:
                    recv_monitor_message(self._monitor)
                    self._dead = True
                    raise self._gone(stage, version, epoch)
                if deadline.expired:
                    raise DeadlineError(
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
        """Closes the connection; safe twice."""
        self._context.destroy(linger=0)
