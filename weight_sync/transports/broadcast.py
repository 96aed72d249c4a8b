"""Broadcast: every bucket reaches every worker, which keeps what its recording needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.comm.deadline import Deadline
from weight_sync.kernels.base import CompiledCopy
from weight_sync.kernels.compiler import compile_copy
from weight_sync.kernels.pieces import PieceTable
from weight_sync.program import BroadcastKeeps, ReceiverProgram
from weight_sync.transports.groups import Groups
from weight_sync.transports.landing import Landing
from weight_sync.transports.packed import cuts_digest, packed_strides
from weight_sync.transports.rounds import padded

I64 = NDArray[np.int64]


class BroadcastArrivals:
    """The engine side: buckets arrive in two scratch buffers, kept parts are copied to the arena.

    Args:
        program: The worker's part of the plan.
        keeps: What the worker keeps of which bucket.
        dtypes: dtype of each piece on the wire.
        item: int64 ``[n]``, bytes per element of each piece on the wire.
        device: Where buffers lie.
    """

    def __init__(
        self,
        program: ReceiverProgram,
        keeps: BroadcastKeeps,
        dtypes: Sequence[str],
        item: I64,
        device: torch.device,
    ) -> None:
        self._dtypes = dtypes
        self._item = item
        self._origin = program.offset.unpack().astype(np.int64)
        size = program.size.unpack().astype(np.int64)
        self._stride = packed_strides(size)
        self._piece_bytes = padded(size.prod(axis=1) * item)
        self._root = keeps.root.unpack().tolist()
        self._nbytes = keeps.nbytes.unpack().astype(np.int64)
        self._row = keeps.row.unpack().astype(np.int64)
        self._bucket = keeps.bucket.unpack().astype(np.int64)
        self._start = keeps.start.unpack().astype(np.int64)
        self._src_stride = keeps.stride.unpack().astype(np.int64)
        self._offset = keeps.offset.unpack().astype(np.int64)
        self._size = keeps.size.unpack().astype(np.int64)
        self.steps = len(self._nbytes)
        self.cuts = {"": cuts_digest(self._nbytes)}
        largest = int(self._nbytes.max(initial=0))
        self._scratch = [
            torch.empty(largest, dtype=torch.uint8, device=device)
            for _ in range(min(2, self.steps))
        ]
        self.scratch_bytes = largest * len(self._scratch)
        cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) if cuda else None for _ in self._scratch]
        self._base = np.zeros(len(size), np.int64)
        self._copies: dict[int, CompiledCopy | None] = {}

    def landing(self, steps: range) -> Landing:
        """Pieces whose last part comes in these steps, densely packed."""
        last = np.full(len(self._base), -1, np.int64)
        np.maximum.at(last, self._row, self._bucket)
        rows = np.flatnonzero((last >= steps.start) & (last < steps.stop))
        nbytes = self._piece_bytes[rows]
        self._base[rows] = np.cumsum(nbytes) - nbytes
        return Landing(rows, self._base[rows], int(nbytes.sum()))

    def launch(
        self, groups: Groups, step: int, landing: Landing, arena: torch.Tensor, deadline: Deadline
    ) -> int:
        """Receives one bucket; copies from the one before go on meanwhile."""
        stream = self._streams[step % 2]
        nbytes = int(self._nbytes[step])
        scratch = self._scratch[step % 2]
        # The scratch buffer was last read by the copies of step - 2, which are on this stream.
        groups.wait_stream(stream)
        with groups.launch():
            groups.broadcast(scratch[:nbytes], self._root[step])
        groups.release_stream(stream, deadline)
        if step not in self._copies:
            self._copies[step] = self._compile(step, scratch, arena)
        copy = self._copies[step]
        if copy is not None:
            with torch.cuda.stream(stream) if stream is not None else nullcontext():
                copy.run()
        return nbytes

    def _compile(
        self, step: int, scratch: torch.Tensor, arena: torch.Tensor
    ) -> CompiledCopy | None:
        parts = np.flatnonzero(self._bucket == step)
        if not len(parts):
            return None
        groups: dict[str, list[int]] = defaultdict(list)
        for part in parts.tolist():
            groups[self._dtypes[int(self._row[part])]].append(part)
        tables = []
        for dtype, members in groups.items():
            at = np.array(members, np.int64)
            row = self._row[at]
            inside = ((self._offset[at] - self._origin[row]) * self._stride[row]).sum(axis=1)
            zero = np.zeros(len(at), np.int32)
            tables.append(
                PieceTable(
                    src_dtype=dtype,
                    dst_dtype=dtype,
                    shape=self._size[at],
                    src_buffer=zero,
                    src_offset=self._start[at],
                    src_stride=self._src_stride[at],
                    dst_buffer=zero,
                    dst_offset=self._base[row] // self._item[row] + inside,
                    dst_stride=self._stride[row],
                    index_offset=zero.astype(np.int64),
                    index_stride=self._stride[row],
                    slot=zero,
                )
            )
        return compile_copy(tables, [scratch], [arena])

    def finish(self) -> None:
        """Waits for the copies into the arena."""
        for stream in self._streams:
            if stream is not None:
                stream.synchronize()
