"""The control plane's connection to the control server of one engine worker."""

from __future__ import annotations

from typing import TypeVar

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import WeightSyncError
from weight_sync.failures import to_error
from weight_sync.messages import Failure, Message, decode_control_reply, encode
from weight_sync.wire.address import Address
from weight_sync.wire.client import Client

Reply = TypeVar("Reply", bound=Message)


class WorkerPeer:
    """Typed calls to one worker, beside its engine's RPC.

    Args:
        name: How errors call it, e.g. ``"shard 0 worker 1"``.
        address: Where its control server listens.
    """

    def __init__(self, name: str, address: Address) -> None:
        self.name = name
        self._address = address
        self._client = Client(address, name)

    def call(
        self,
        request: Message,
        expect: type[Reply],
        deadline: Deadline,
        stage: str,
        version: int | None = None,
        epoch: int | None = None,
    ) -> Reply:
        """Sends a request and returns a reply of the expected type.

        Raises:
            WeightSyncError: The error the worker reported, or that it is dead or silent.
        """
        raw = self._client.call(encode(request), deadline, stage, version, epoch)
        reply = decode_control_reply(raw)
        if isinstance(reply, Failure):
            raise to_error(reply, self.name)
        if not isinstance(reply, expect):
            raise WeightSyncError(
                f"{self.name} answered {type(reply).__name__} where {expect.__name__} was due; "
                "trainer and engine run different versions of this library"
            )
        return reply

    def fresh(self) -> WorkerPeer:
        """One more connection to the same worker, for a call that must not wait for others."""
        return WorkerPeer(self.name, self._address)

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()
