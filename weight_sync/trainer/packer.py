"""Packs buckets of a trainer rank's pieces into two buffers, one filled while the other is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.dtypes import itemsize
from weight_sync.kernels.base import CompiledCopy
from weight_sync.kernels.compiler import compile_copy
from weight_sync.kernels.pieces import PieceTable
from weight_sync.manifest import Manifest
from weight_sync.trainer.export import LocalRegions
from weight_sync.trainer.hashing import tables_of
from weight_sync.transports.packed import packed_strides

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Bucketed:
    """Pieces of a rank with their places in buckets.

    Attributes:
        region: int64 ``[n]``, number of the region in the rank's manifest.
        offset: int64 ``[n, R]``, global offset.
        size: int64 ``[n, R]``.
        bucket: int64 ``[n]``, ascending.
        start: int64 ``[n]``, byte offset in the bucket.
        nbytes: Size of the largest bucket.
    """

    region: I64
    offset: I64
    size: I64
    bucket: I64
    start: I64
    nbytes: int


class Packer:
    """Packs one stream.

    Values are cast to their dtype on the wire as they are packed. Pieces in host memory reach a GPU
    buffer through pinned memory.

    Args:
        manifest: The rank's manifest.
        pieces: What to pack where.
        device: Where the buffers are that go on the wire.
        slots: The buffers, if they must be special memory: bucket ``k`` goes to slot ``k % 2``.
    """

    def __init__(
        self,
        manifest: Manifest,
        pieces: Bucketed,
        device: torch.device,
        slots: Sequence[torch.Tensor] = (),
    ) -> None:
        self._manifest = manifest
        self._pieces = pieces
        self.slots = list(slots) or [
            torch.empty(pieces.nbytes, dtype=torch.uint8, device=device) for _ in range(2)
        ]
        self._pinned: dict[int, torch.Tensor] = {}
        self._generation = -1
        self._copies: dict[int, list[CompiledCopy]] = {}
        self._through_host: dict[int, int] = {}

    def prepare(self, regions: LocalRegions, generation: int) -> None:
        """Compiles all copies; nothing to do while ``generation`` stays the same."""
        if generation == self._generation:
            return
        self.forget()
        pieces = self._pieces
        tables = tables_of(
            self._manifest,
            regions,
            pieces.region,
            pieces.offset,
            pieces.size,
            np.arange(len(pieces.region), dtype=np.int32),
        )
        on_host = np.array([not s.is_cuda for s in regions.storages], bool)
        staged = self.slots[0].is_cuda and bool(on_host.any())
        by_bucket: dict[int, list[PieceTable]] = {}
        for table in tables:
            placed = self._placed(table)
            bucket = pieces.bucket[table.slot]
            order = np.argsort(bucket, kind="stable")
            numbers, first = np.unique(bucket[order], return_index=True)
            for number, rows in zip(numbers.tolist(), np.split(order, first[1:]), strict=True):
                by_bucket.setdefault(number, []).append(placed.take(rows))
        for number, parts in by_bucket.items():
            if staged:
                self._compile_mixed(number, parts, regions, on_host)
            else:
                slot = self.slots[number % 2]
                self._copies[number] = [compile_copy(parts, regions.storages, [slot])]
        self._generation = generation

    def _placed(self, table: PieceTable) -> PieceTable:
        pieces = self._pieces
        zero = np.zeros(len(table), np.int32)
        return replace(
            table,
            dst_buffer=zero,
            dst_offset=pieces.start[table.slot] // itemsize(table.dst_dtype),
            dst_stride=packed_strides(table.shape),
        )

    def _compile_mixed(
        self,
        number: int,
        parts: list[PieceTable],
        regions: LocalRegions,
        on_host: NDArray[np.bool_],
    ) -> None:
        host = [t.take(on_host[t.src_buffer]) for t in parts]
        device = [t.take(~on_host[t.src_buffer]) for t in parts]
        if any(len(t) for t in host):
            if number % 2 not in self._pinned:
                self._pinned[number % 2] = torch.empty(
                    self._pieces.nbytes, dtype=torch.uint8, pin_memory=True
                )
            pinned = self._pinned[number % 2]
            ends = self._pieces.bucket == number
            self._through_host[number] = int(
                (self._pieces.start[ends] + self._wire_bytes(ends)).max()
            )
            sources = [s if h else pinned for s, h in zip(regions.storages, on_host, strict=True)]
            self._copies[number] = [compile_copy(host, sources, [pinned])]
        if any(len(t) for t in device):
            slot = self.slots[number % 2]
            sources = [slot if h else s for s, h in zip(regions.storages, on_host, strict=True)]
            self._copies.setdefault(number, []).append(compile_copy(device, sources, [slot]))

    def _wire_bytes(self, rows: NDArray[np.bool_]) -> I64:
        owner = self._manifest.owner.unpack()[self._pieces.region[rows]]
        item = np.array([itemsize(self._manifest.tensors[int(o)].dtype) for o in owner], np.int64)
        return self._pieces.size[rows].prod(axis=1) * item

    def regions(self, number: int) -> I64:
        """int64 ``[n]``, the regions that a bucket has pieces of."""
        first, last = np.searchsorted(self._pieces.bucket, [number, number + 1]).tolist()
        return self._pieces.region[first:last]

    def pack(self, number: int) -> torch.Tensor:
        """Packs a bucket on torch's current stream into slot ``number % 2``, which is returned."""
        slot = self.slots[number % 2]
        copies = self._copies[number]
        if number in self._through_host:
            pinned = self._pinned[number % 2]
            # The copy of two buckets ago must have left the pinned buffer.
            torch.cuda.current_stream(slot.device).synchronize()
            copies[0].run()
            used = self._through_host[number]
            slot[:used].copy_(pinned[:used], non_blocking=True)
            copies = copies[1:]
        for copy in copies:
            copy.run()
        return slot

    def forget(self) -> None:
        """Drops everything that refers to weight memory."""
        self._copies.clear()
        self._through_host.clear()
        self._generation = -1
