"""A worker's or synchronizer's connection to one trainer rank."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import WeightSyncError
from weight_sync.failures import to_error
from weight_sync.manifest import Manifest
from weight_sync.messages import (
    AwaitVersion,
    Failure,
    GetManifest,
    GotManifest,
    Message,
    Published,
    decode_trainer_reply,
    encode,
)
from weight_sync.program import ReceiverProgram
from weight_sync.wire.address import Address
from weight_sync.wire.client import Client

Reply = TypeVar("Reply", bound=Message)


class TrainerPeer:
    """Typed calls to one trainer rank.

    Args:
        rank: Its rank.
        address: Where its endpoint listens.
    """

    def __init__(self, rank: int, address: Address) -> None:
        self.rank = rank
        self.name = f"trainer {rank}"
        self.generation = -1
        self._address = address
        self._client = Client(address, self.name)
        self._manifest: Manifest | None = None

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
        reply = decode_trainer_reply(raw)
        if isinstance(reply, Failure):
            raise to_error(reply, self.name)
        if not isinstance(reply, expect):
            raise WeightSyncError(
                f"{self.name} answered {type(reply).__name__} where {expect.__name__} was "
                "expected; trainer and engine run different versions of this library"
            )
        return reply

    def manifest(self, deadline: Deadline) -> Manifest:
        """What the rank holds; asked once."""
        if self._manifest is None:
            self._manifest = self.call(GetManifest(), GotManifest, deadline, "manifest").manifest
        return self._manifest

    def await_version(self, version: int, epoch: int, deadline: Deadline, *, verify: bool) -> None:
        """Waits until the rank's weights are at ``version``; remembers its generation."""
        reply = self.call(
            AwaitVersion(version, epoch, deadline.remaining(), verify),
            Published,
            deadline,
            "publish",
            version,
            epoch,
        )
        self.generation = reply.generation

    def region_offsets(self) -> NDArray[np.int64]:
        """int64 ``[regions, R]`` global offset of each of the rank's regions."""
        assert self._manifest is not None
        return self._manifest.offset.unpack().astype(np.int64)

    def wire_dtypes(self, program: ReceiverProgram, rows: NDArray[np.int64]) -> list[str]:
        """dtype on the wire of the given pieces of a program."""
        assert self._manifest is not None
        owner = self._manifest.owner.unpack()
        region = program.region.unpack()[rows]
        return [self._manifest.tensors[int(owner[r])].dtype for r in region]

    def fresh(self) -> TrainerPeer:
        """One more connection to the same rank, for a call that must not wait for others."""
        return TrainerPeer(self.rank, self._address)

    def abort(self, reason: str) -> None:
        """Ends calls that wait, from any thread, and every later one."""
        self._client.abort(reason)

    def close(self) -> None:
        """Closes the connection."""
        self._client.close()
