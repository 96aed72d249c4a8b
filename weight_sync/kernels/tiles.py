"""Cuts pieces into tiles of bounded size: the unit one thread or one CUDA block works on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weight_sync.dtypes import itemsize
from weight_sync.kernels.base import Side
from weight_sync.kernels.pieces import PieceTable, Rows, to_rows

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Tiles:
    """Tiles of one table with addresses and steps in bytes (flat indices stay in elements).

    Attributes:
        rows: int64 ``[m]``, rows per tile.
        inner: int64 ``[m]``, elements per row.
        start: side -> int64 ``[m]``, byte address of the first element, or flat index of it.
        outer_step: side -> int64 ``[m]``, from one row to the next.
        inner_step: side -> int64 ``[m]``, from one element to the next.
        slot: int64 ``[m]``, digest slot.
    """

    rows: I64
    inner: I64
    start: dict[str, I64]
    outer_step: dict[str, I64]
    inner_step: dict[str, I64]
    slot: I64

    def __len__(self) -> int:
        return len(self.rows)

    def dense(self, sizes: dict[str, int]) -> NDArray[np.bool_]:
        """Which tiles have neighbours side by side on every side named in ``sizes``."""
        answer = self.inner == 1
        together = np.ones(len(self), dtype=bool)
        for side, size in sizes.items():
            together &= self.inner_step[side] == size
        return answer | together

    def take(self, rows: I64 | NDArray[np.bool_]) -> Tiles:
        """The tiles at ``rows``."""
        return Tiles(
            self.rows[rows],
            self.inner[rows],
            {k: v[rows] for k, v in self.start.items()},
            {k: v[rows] for k, v in self.outer_step.items()},
            {k: v[rows] for k, v in self.inner_step.items()},
            self.slot[rows],
        )


def halves(table: PieceTable) -> PieceTable:
    """An 8-byte table as 4-byte words with flat indices ``2 i`` and ``2 i + 1`` (see ``mix``)."""

    def widen(strides: I64) -> I64:
        return np.concatenate([strides * 2, np.ones((len(strides), 1), np.int64)], axis=1)

    return replace(
        table,
        src_dtype="int32",
        dst_dtype="int32",
        shape=np.concatenate([table.shape, np.full((len(table), 1), 2, np.int64)], axis=1),
        src_offset=table.src_offset * 2,
        src_stride=widen(table.src_stride),
        dst_offset=table.dst_offset * 2,
        dst_stride=widen(table.dst_stride),
        index_offset=table.index_offset * 2,
        index_stride=widen(table.index_stride),
    )


def _cut(rows: Rows, limit: int) -> Rows:
    """Splits entries so that none holds more than ``limit`` elements."""
    # Long rows are cut along the row, short rows are grouped.
    height = np.where(rows.inner > limit, 1, np.maximum(limit // np.maximum(rows.inner, 1), 1))
    width = np.minimum(rows.inner, limit)
    down = -(-rows.outer // height)
    across = -(-rows.inner // np.maximum(width, 1))
    count = down * across
    entry = np.repeat(np.arange(len(count), dtype=np.int64), count)
    number = np.arange(len(entry), dtype=np.int64) - (np.cumsum(count) - count)[entry]
    row = number // across[entry] * height[entry]
    column = number % across[entry] * width[entry]
    return Rows(
        piece=rows.piece[entry],
        outer=np.minimum(height[entry], rows.outer[entry] - row),
        inner=np.minimum(width[entry], rows.inner[entry] - column),
        start={
            s: rows.start[s][entry]
            + row * rows.outer_step[s][entry]
            + column * rows.inner_step[s][entry]
            for s in rows.start
        },
        outer_step={s: v[entry] for s, v in rows.outer_step.items()},
        inner_step={s: v[entry] for s, v in rows.inner_step.items()},
    )


def cut_tiles(table: PieceTable, bases: dict[Side, I64], elements: int, index: bool) -> Tiles:
    """Flattens a table and cuts it to tiles of at most ``elements`` elements.

    Args:
        table: Pieces, already checked against their buffers.
        bases: For each memory side wanted, int64 addresses of its buffers.
        elements: Most elements in one tile.
        index: Whether flat indices are needed (digests) or not (copies).

    Returns:
        Tiles in the order of the pieces; empty pieces give none.
    """
    sides: tuple[str, ...] = (*bases, *(("index",) if index else ()))
    flat = _cut(to_rows(table, sides), elements)
    buffer = {"src": table.src_buffer, "dst": table.dst_buffer}
    size = {"src": itemsize(table.src_dtype), "dst": itemsize(table.dst_dtype), "index": 1}
    start = {s: flat.start[s] * size[s] for s in sides}
    for side, base in bases.items():
        if len(flat.piece):
            start[side] = start[side] + base[buffer[side][flat.piece]]
    return Tiles(
        rows=flat.outer,
        inner=flat.inner,
        start=start,
        outer_step={s: flat.outer_step[s] * size[s] for s in sides},
        inner_step={s: flat.inner_step[s] * size[s] for s in sides},
        slot=table.slot[flat.piece].astype(np.int64),
    )


def tile_bytes(total: int) -> int:
    """Bytes per CUDA tile: small enough to balance a small model, few enough for a large one.

    128 KiB was measured good on H200; a table entry costs 48 to 72 bytes of device memory, so the
    tiles of very large models are longer.

    Args:
        total: Bytes moved in one run.
    """
    for size in (64 << 10, 128 << 10):
        if total <= size * 65536:
            return size
    return 256 << 10


def total_bytes(tables: Sequence[PieceTable]) -> int:
    """Bytes that the destination side of the tables holds."""
    return sum(t.elements * itemsize(t.dst_dtype) for t in tables)
