"""A worker's or synchronizer's connection to one trainer rank."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from weight_sync.comm.deadline import Deadline
from weight_sync.manifest import Manifest
from weight_sync.messages import (
    GetManifest,
    GotManifest,
    decode_trainer_reply,
)
from weight_sync.program import ReceiverProgram
from weight_sync.wire.address import Address
from weight_sync.wire.typed_client import TypedClient


class TrainerPeer(TypedClient):
    """Typed calls to one trainer rank.

    Args:
        rank: Its rank.
        address: Where its endpoint listens.
    """

    def __init__(self, rank: int, address: Address) -> None:
        super().__init__(f"trainer {rank}", address, decode_trainer_reply)
        self.rank = rank
        self.generation = -1
        self._manifest: Manifest | None = None

    def manifest(self, deadline: Deadline) -> Manifest:
        """What the rank holds; asked once."""
        if self._manifest is None:
            self._manifest = self.call(GetManifest(), GotManifest, deadline, "manifest").manifest
        return self._manifest

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
