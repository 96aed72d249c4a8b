"""Same host: the worker maps the trainer's storages once and pulls what its plan says."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
                "the ipc transport needs trainer and engine on one host, but trainer ranks "
                f"{[t.rank for t in far]} run on {sorted({t.host for t in far})} and this worker "
                f"on {here}. Use the broadcast or reshard transport."
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
            # What moved would otherwise stay taken; and memory allocated anew at an old address may
            # have a handle with the same bytes.
            self._mapper.close()
            self._layout = self._map(deadline)
        self._check()
        if len(self._layout.delivery.rows):
            yield self._layout.delivery
        if self._layout.staged:
            yield from self._pull_staged(self._layout.staged, version, deadline)

    def _pull_staged(
        self, staged: dict[int, I64], version: int, deadline: Deadline
    ) -> Iterator[Delivery]:
        streams = [_Stream(self._program, self._peers[rank], staged[rank]) for rank in staged]
        # In the order of the program, which is that of the engine's modules, so that a module whose
        # pieces come from several ranks is soon complete and few are held open.
        jobs = sorted(
            ((s, number) for s in streams for number in range(s.buckets.count)),
            key=lambda job: job[0].first_row(job[1]),
        )

        def ask(job: tuple[_Stream, int]) -> Staged:
            return job[0].ask(job[1], version, deadline)

        # The next bucket is packed while this one is read; asking for it says that the one before
        # this one was read, so its slot is free.
        with ThreadPoolExecutor(1, thread_name_prefix="weight-sync-buckets") as pool:
            # Taken out before it is looked at: else its error and this frame would hold each other,
            # and with them the mappings.
            ahead: deque[Future[Staged]] = deque([pool.submit(ask, jobs[0])])
            for at, (stream, number) in enumerate(jobs):
                self._check()
                reply = ahead.popleft().result()
                if at + 1 < len(jobs):
                    ahead.append(pool.submit(ask, jobs[at + 1]))
                yield stream.delivery(number, self._mapper.map(reply.slot, stream.peer.name), reply)

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


class _Stream:
    """What one trainer rank stages for this worker."""

    def __init__(self, program: ReceiverProgram, peer: TrainerPeer, rows: I64) -> None:
        self.peer = peer
        self._program = program
        self._rows = rows
        size = program.size.unpack().astype(np.int64)[rows]
        self._dtypes = peer.wire_dtypes(program, rows)
        self._item = np.array([itemsize(d) for d in self._dtypes], np.int64)
        self.buckets: Buckets = cut(
            size.prod(axis=1) * self._item,
            program.unit.unpack()[rows].astype(np.int32),
            program.bucket_bytes,
        )
        self._stride = np.array([contiguous_strides(tuple(s)) for s in size.tolist()], np.int64)

    def first_row(self, number: int) -> int:
        """The first piece of a bucket, as its index in the program."""
        return int(self._rows[np.searchsorted(self.buckets.bucket, number)])

    def ask(self, number: int, version: int, deadline: Deadline) -> Staged:
        """Lets the trainer pack a bucket.

        Raises:
            LayoutError: If the trainer cuts its stream otherwise.
        """
        program = self._program
        reply = self.peer.call(
            StageBucket(program.epoch, program.plan_digest, version, program.worker, number),
            Staged,
            deadline,
            "transfer",
            version,
        )
        if reply.buckets != self.buckets.count:
            raise LayoutError(
                f"{self.peer.name} cuts its stream into {reply.buckets} buckets, this worker into "
                f"{self.buckets.count}; plans differ"
            )
        return reply

    def delivery(self, number: int, memory: torch.Tensor | RawBuffer, reply: Staged) -> Delivery:
        """The pieces of a bucket, in the slot it lies in."""
        mine = np.flatnonzero(self.buckets.bucket == number)
        return Delivery(
            rows=self._rows[mine],
            buffers=[memory],
            buffer=np.zeros(len(mine), np.int32),
            offset=self.buckets.offset[mine] // self._item[mine],
            stride=self._stride[mine],
            dtypes=tuple(self._dtypes[i] for i in mine),
            # Memory of another generation may have a handle with the same bytes.
            key=("staged", self.peer.rank, self.peer.generation, number, reply.slot),
        )
