"""A connection whose requests and replies are messages: what another process reports is raised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        with self.begin(request, expect, deadline, stage, version, epoch) as reply:
            return reply()

    @contextmanager
    def begin(
        self,
        request: Message,
        expect: type[Reply],
        deadline: Deadline,
        stage: str,
        version: int | None = None,
        epoch: int | None = None,
    ) -> Iterator[Callable[[], Reply]]:
        """As :meth:`call`, but the reply is waited for only when what is yielded is called."""

        def reply() -> Reply:
            answer = self._decode(raw())
            if isinstance(answer, Failure):
                raise to_error(answer, self.name)
            if not isinstance(answer, expect):
                raise WeightSyncError(
                    f"{self.name} answered {type(answer).__name__} where {expect.__name__} was "
                    "expected; trainer and engine run different versions of this library"
                )
            return answer

        with self._client.begin(encode(request), deadline, stage, version, epoch) as raw:
            yield reply

    def abort(self, reason: str) -> None:
        """Ends calls that wait, from any thread, and every later one."""
        self._client.abort(reason)

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()
