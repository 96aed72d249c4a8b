"""The readable reference of a transport: trainer and workers in one process, nothing to send.

It does in plain Python what the packed transports do with kernels and groups: each sender's pieces
in the order of the plan, in their wire dtype, cut into buckets by the plan and packed one after the
other. A bucket's memory is overwritten once it is released, so a receiver that keeps a view shows
at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.buckets import Buckets, cut
from weight_sync.comm.deadline import Deadline
from weight_sync.dtypes import itemsize
from weight_sync.errors import AbortedError, EnvironmentUnsupportedError
from weight_sync.layout import contiguous_strides
from weight_sync.manifest import widen
from weight_sync.messages import TrainerEndpointInfo
from weight_sync.program import ReceiverProgram
from weight_sync.sources.base import WeightSource
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.transports.base import Delivery

I64 = NDArray[np.int64]


class MemoryHub:
    """Where the receivers of this process find the sources of this process."""

    def __init__(self) -> None:
        self._sources: dict[str, WeightSource] = {}

    def offer(self, info: TrainerEndpointInfo, source: WeightSource) -> None:
        """Makes a rank's weights reachable.

        Args:
            info: The rank's endpoint, which serves everything but bytes.
            source: The source the endpoint was made of.
        """
        self._sources[info.address.url] = source

    def receiver(self, device: torch.device, peers: dict[int, TrainerPeer]) -> MemoryReceiver:
        """The engine side; fits ``registry.register_transport``."""
        return MemoryReceiver(device, peers, self)

    def find(self, info: TrainerEndpointInfo) -> WeightSource:
        """The source behind an endpoint.

        Raises:
            EnvironmentUnsupportedError: If the rank lives in another process.
        """
        if info.address.url not in self._sources:
            raise EnvironmentUnsupportedError(
                f"trainer {info.rank} does not live in this process; offer() its source to the "
                "hub, or use the ipc transport"
            )
        return self._sources[info.address.url]


def _overwrite(memory: torch.Tensor) -> None:
    memory.fill_(0xFF)


class _Stream:
    """What one sender packs for this worker; iterates over the numbers of its buckets."""

    def __init__(self, program: ReceiverProgram, peer: TrainerPeer) -> None:
        self.rows: I64 = np.flatnonzero(program.sender.unpack() == peer.rank)
        self.dtypes = peer.wire_dtypes(program, self.rows)
        self.items = np.array([itemsize(dtype) for dtype in self.dtypes], np.int64)
        size = program.size.unpack().astype(np.int64)[self.rows]
        unit = program.unit.unpack()[self.rows].astype(np.int32)
        self.buckets: Buckets = cut(size.prod(axis=1) * self.items, unit, program.bucket_bytes)
        self.strides = np.array([contiguous_strides(tuple(s)) for s in size.tolist()], np.int64)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.buckets.count))

    def of(self, number: int) -> I64:
        """Which of ``rows`` are in a bucket."""
        return np.flatnonzero(self.buckets.bucket == number)


class MemoryReceiver:
    """The engine side; see :class:`weight_sync.transports.base.ReceiverTransport`."""

    def __init__(self, device: torch.device, peers: dict[int, TrainerPeer], hub: MemoryHub) -> None:
        self._device = device
        self._peers = peers
        self._hub = hub
        self._sources: dict[int, WeightSource] = {}
        self._bucket = torch.empty(0, dtype=torch.uint8, device=device)
        self._aborted = ""

    @property
    def extra_bytes(self) -> int:
        """The one bucket."""
        return self._bucket.numel()

    def connect(
        self,
        program: ReceiverProgram,
        trainers: Sequence[TrainerEndpointInfo],
        deadline: Deadline,
    ) -> None:
        """Finds the source of every sender of the program."""
        self._program = program
        self._sources = {t.rank: self._hub.find(t) for t in trainers if t.rank in self._peers}

    def transfer(self, version: int, deadline: Deadline) -> Iterator[Delivery]:
        """Yields one packed bucket at a time, in the order of the program."""
        program = self._program
        streams = {rank: _Stream(program, self._peers[rank]) for rank in self._sources}
        jobs = sorted((int(s.rows[s.of(n)[0]]), r, n) for r, s in streams.items() for n in s)
        for _, rank, number in jobs:
            deadline.check("transfer", version=version, epoch=program.epoch)
            if self._aborted:
                raise AbortedError(self._aborted, stage="transfer", epoch=program.epoch)
            stream = streams[rank]
            memory = self._bucket_of(int(stream.buckets.nbytes[number]))
            mine = stream.of(number)
            for i in mine.tolist():
                piece = self._piece(rank, int(stream.rows[i]))
                dtype = getattr(torch, stream.dtypes[i])
                begin = int(stream.buckets.offset[i])
                end = begin + piece.numel() * dtype.itemsize
                memory[begin:end].view(dtype).view(piece.shape).copy_(piece)
            yield Delivery(
                rows=stream.rows[mine],
                buffers=[memory],
                buffer=np.zeros(len(mine), np.int32),
                offset=stream.buckets.offset[mine] // stream.items[mine],
                stride=stream.strides[mine],
                dtypes=tuple(stream.dtypes[i] for i in mine),
                key=("memory", rank, number, memory.data_ptr()),
                release=partial(_overwrite, memory),
            )

    def _bucket_of(self, nbytes: int) -> torch.Tensor:
        if self._bucket.numel() < nbytes:
            self._bucket = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._bucket

    def _piece(self, rank: int, row: int) -> torch.Tensor:
        """The part of a trainer's local tensor that one piece of the program names."""
        program = self._program
        number = int(program.region.unpack()[row])
        region = self._sources[rank].region(number)
        width = program.offset.unpack().shape[1]
        origin = widen(self._peers[rank].region_offsets(), width, 0)[number]
        start = (program.offset.unpack()[row] - origin)[width - region.dim() :]
        size = program.size.unpack()[row][width - region.dim() :]
        return region[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]

    def abort(self, reason: str) -> None:
        """Ends a transfer at its next bucket."""
        self._aborted = self._aborted or reason

    def close(self) -> None:
        """Forgets the sources."""
        self._sources.clear()
