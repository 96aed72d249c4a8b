"""Same host: the worker maps the trainer's storages once and pulls what its plan says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.buckets import Buckets, cut
from weight_sync.comm.deadline import Deadline
from weight_sync.dtypes import itemsize
from weight_sync.errors import AbortedError, EnvironmentUnsupportedError, LayoutError
from weight_sync.identity import host_identity
from weight_sync.kernels.base import RawBuffer
from weight_sync.layout import contiguous_strides
from weight_sync.manifest import widen
from weight_sync.messages import (
    Exports,
    GetExports,
    StageBucket,
    Staged,
    TrainerEndpointInfo,
)
from weight_sync.program import ReceiverProgram
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.transports.base import Delivery
from weight_sync.transports.mapping import Mapper

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class _Layout:
    """Where the exportable pieces lie, at one generation of every sender."""

    generations: tuple[int, ...]
    delivery: Delivery
    staged: dict[int, I64]


class IpcReceiver:
    """The engine side of the ipc transport.

    Args:
        device: Where the worker's parameters are.
        peers: One connection per trainer rank, shared with the worker's digest requests.
    """

    def __init__(self, device: torch.device, peers: dict[int, TrainerPeer]) -> None:
        self._device = device
        self._peers = peers
        self._mapper = Mapper(device)
        self._layout: _Layout | None = None
        self._aborted = ""

    @property
    def extra_bytes(self) -> int:
        """Direct pulls hold no memory; ring slots belong to the trainer."""
        return 0

    def connect(
        self,
        program: ReceiverProgram,
        trainers: Sequence[TrainerEndpointInfo],
        deadline: Deadline,
    ) -> None:
        """Maps every storage of every sender of the program."""
        self._program = program
        self._sender = program.sender.unpack().astype(np.int64)
        self._ranks: list[int] = np.unique(self._sender).tolist()
        here = host_identity()
        senders = set(self._ranks)
        far = [t for t in trainers if t.rank in senders and t.host != here]
        if far:
            raise EnvironmentUnsupportedError(
                f"the ipc transport needs trainer and engine on one host, but trainer ranks "
                f"{[t.rank for t in far]} run on {sorted({t.host for t in far})} and this worker on "
                f"{here}. Use the broadcast or reshard transport."
            )
        self._layout = self._map(deadline)

    def _map(self, deadline: Deadline) -> _Layout:
        program = self._program
        region = program.region.unpack().astype(np.int64)
        offset = program.offset.unpack().astype(np.int64)
        width = offset.shape[1]
        n = len(region)
        buffers: list[torch.Tensor | RawBuffer] = []
        buffer = np.zeros(n, np.int32)
        start = np.zeros(n, np.int64)
        stride = np.zeros((n, width), np.int64)
        direct = np.zeros(n, bool)
        dtypes = np.empty(n, object)
        staged: dict[int, I64] = {}
        generations = []
        for rank in self._ranks:
            peer = self._peers[rank]
            exports = peer.call(
                GetExports(program.epoch, program.plan_digest), Exports, deadline, "export"
            )
            generations.append(exports.generation)
            rows = np.flatnonzero(self._sender == rank)
            place = exports.storage.unpack().astype(np.int64)
            if len(rows) and (region[rows].max() >= len(place) or region[rows].min() < 0):
                raise LayoutError(
                    f"{peer.name} exports fewer regions than the plan uses; plan again"
                )
            mapped = [self._mapper.map(h, peer.name) for h in exports.storages]
            at = place[region[rows]]
            mine = rows[at >= 0]
            direct[mine] = True
            buffer[mine] = (at[at >= 0] + len(buffers)).astype(np.int32)
            local_stride = widen(exports.stride.unpack().astype(np.int64), width, 0)
            origin = widen(peer.region_offsets(), width, 0)
            begin = exports.offset.unpack().astype(np.int64)
            stride[mine] = local_stride[region[mine]]
            inside = offset[mine] - origin[region[mine]]
            start[mine] = begin[region[mine]] + (inside * stride[mine]).sum(axis=1)
            dtypes[rows] = np.array(exports.dtypes, object)[region[rows]]
            buffers.extend(mapped)
            if (at < 0).any():
                staged[rank] = rows[at < 0]
        rows = np.flatnonzero(direct)
        delivery = Delivery(
            rows=rows,
            buffers=buffers,
            buffer=buffer[rows],
            offset=start[rows],
            stride=stride[rows],
            dtypes=tuple(dtypes[rows].tolist()),
            key=("direct", tuple(generations)),
        )
        return _Layout(tuple(generations), delivery, staged)

    def transfer(self, version: int, deadline: Deadline) -> Iterator[Delivery]:
        """Yields all exportable pieces at once, then the staged ones bucket by bucket."""
        assert self._layout is not None
        now = tuple(self._peers[rank].generation for rank in self._ranks)
        if now != self._layout.generations:
            self._layout = self._map(deadline)
        self._check()
        if len(self._layout.delivery.rows):
            yield self._layout.delivery
        for rank, rows in self._layout.staged.items():
            yield from self._pull_staged(rank, rows, version, deadline)

    def _pull_staged(
        self, rank: int, rows: I64, version: int, deadline: Deadline
    ) -> Iterator[Delivery]:
        program, peer = self._program, self._peers[rank]
        size = program.size.unpack().astype(np.int64)[rows]
        wire = peer.wire_dtypes(program, rows)
        item = np.array([itemsize(d) for d in wire], np.int64)
        buckets: Buckets = cut(
            size.prod(axis=1) * item,
            program.unit.unpack()[rows].astype(np.int32),
            program.bucket_bytes,
        )
        strides = np.array([contiguous_strides(tuple(s)) for s in size.tolist()], np.int64)
        for number in range(buckets.count):
            self._check()
            reply = peer.call(
                StageBucket(program.epoch, program.plan_digest, version, program.worker, number),
                Staged,
                deadline,
                "transfer",
                version,
            )
            if reply.buckets != buckets.count:
                raise LayoutError(
                    f"{peer.name} cuts its stream into {reply.buckets} buckets, this worker into "
                    f"{buckets.count}; plans differ"
                )
            mine = np.flatnonzero(buckets.bucket == number)
            yield Delivery(
                rows=rows[mine],
                buffers=[self._mapper.map(reply.slot, peer.name)],
                buffer=np.zeros(len(mine), np.int32),
                offset=buckets.offset[mine] // item[mine],
                stride=strides[mine],
                dtypes=tuple(wire[i] for i in mine),
                key=("staged", rank, number, reply.slot),
            )

    def _check(self) -> None:
        if self._aborted:
            raise AbortedError(self._aborted, stage="transfer", epoch=self._program.epoch)

    def abort(self, reason: str) -> None:
        """Ends a transfer at its next step."""
        self._aborted = self._aborted or reason

    def close(self) -> None:
        """Drops every mapping."""
        self._layout = None
        self._mapper.close()
