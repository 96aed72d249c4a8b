"""A connection whose requests and replies are messages: what another process reports is raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import WeightSyncError
from weight_sync.failures import to_error
from weight_sync.messages import Failure, Message, encode
from weight_sync.wire.address import Address
from weight_sync.wire.client import Client

Reply = TypeVar("Reply", bound=Message)


class TypedClient:
    """Typed calls to one server.

    Args:
        name: How errors call the other side, e.g. ``"shard 0 worker 1"``.
        address: Where it listens.
        decode: Turns its replies into messages, and refuses what is none.
    """

    def __init__(self, name: str, address: Address, decode: Callable[[bytes], Message]) -> None:
        self.name = name
        self._address = address
        self._decode = decode
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
            WeightSyncError: The error the other side reported, or that it is dead or silent.
        """
        raw = self._client.call(encode(request), deadline, stage, version, epoch)
        reply = self._decode(raw)
        if isinstance(reply, Failure):
            raise to_error(reply, self.name)
        if not isinstance(reply, expect):
            raise WeightSyncError(
                f"{self.name} answered {type(reply).__name__} where {expect.__name__} was "
                "expected; trainer and engine run different versions of this library"
            )
        return reply

    def abort(self, reason: str) -> None:
        """Ends calls that wait, from any thread, and every later one."""
        self._client.abort(reason)

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()
