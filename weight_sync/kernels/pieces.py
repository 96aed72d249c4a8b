"""Tables of strided pieces: the one description that copy and digest kernels run from.

A piece is a small box of one tensor seen three ways: where its elements lie in a source buffer,
where they go in a destination buffer, and which flat index they have in the global (unsharded)
tensor. A table holds many pieces of one source and one destination dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]


@dataclass(frozen=True)
class PieceTable:
    """Pieces that share dtypes. Offsets and strides count elements of the side they describe.

    Attributes:
        src_dtype: torch dtype name of the source elements, e.g. ``"float32"``.
        dst_dtype: torch dtype name of the destination elements; differs from ``src_dtype`` only
            where values are cast in flight (round to nearest even, as ``Tensor.to``).
        shape: int64 ``[n, R]``, box sizes, padded on the left with 1.
        src_buffer: int32 ``[n]``, index of the source buffer.
        src_offset: int64 ``[n]``.
        src_stride: int64 ``[n, R]``.
        dst_buffer: int32 ``[n]``, index of the destination buffer.
        dst_offset: int64 ``[n]``.
        dst_stride: int64 ``[n, R]``.
        index_offset: int64 ``[n]``, flat index of the first element in the global tensor.
        index_stride: int64 ``[n, R]``, row-major strides of the global tensor.
        slot: int32 ``[n]``, digest slot (one per tensor, usually) that the piece adds to.
    """

    src_dtype: str
    dst_dtype: str
    shape: I64
    src_buffer: I32
    src_offset: I64
    src_stride: I64
    dst_buffer: I32
    dst_offset: I64
    dst_stride: I64
    index_offset: I64
    index_stride: I64
    slot: I32

    def __len__(self) -> int:
        return len(self.src_offset)

    @property
    def elements(self) -> int:
        """Number of elements in all pieces."""
        return int(self.shape.prod(axis=1).sum()) if len(self) else 0

    def take(self, rows: I64 | NDArray[np.bool_] | slice) -> PieceTable:
        """The pieces at ``rows``, as a table of their own."""
        return PieceTable(
            self.src_dtype,
            self.dst_dtype,
            self.shape[rows],
            self.src_buffer[rows],
            self.src_offset[rows],
            self.src_stride[rows],
            self.dst_buffer[rows],
            self.dst_offset[rows],
            self.dst_stride[rows],
            self.index_offset[rows],
            self.index_stride[rows],
            self.slot[rows],
        )


@dataclass(frozen=True)
class Rows:
    """Pieces flattened to rows: ``outer`` rows of ``inner`` elements each.

    Attributes:
        piece: int64 ``[m]``, which piece of the table the entry came from.
        outer: int64 ``[m]``, number of rows.
        inner: int64 ``[m]``, elements per row.
        start: mapping side -> int64 ``[m]`` element offset of the first element.
        outer_step: mapping side -> int64 ``[m]`` elements between rows.
        inner_step: mapping side -> int64 ``[m]`` elements between neighbours in a row (1 = dense).
    """

    piece: I64
    outer: I64
    inner: I64
    start: dict[str, I64]
    outer_step: dict[str, I64]
    inner_step: dict[str, I64]


def _sides(table: PieceTable) -> dict[str, tuple[I64, I64]]:
    return {
        "src": (table.src_offset, table.src_stride),
        "dst": (table.dst_offset, table.dst_stride),
        "index": (table.index_offset, table.index_stride),
    }


def _merge_dims(shape: I64, strides: dict[str, I64]) -> tuple[I64, dict[str, I64]]:
    """Folds neighbouring dimensions that are dense in every side, moving sizes to the right."""
    shape = shape.copy()
    strides = {k: v.copy() for k, v in strides.items()}
    rank = shape.shape[1]
    for _ in range(rank):
        for d in range(rank - 1, 0, -1):
            # Size-1 neighbours carry no stride of their own: always foldable.
            outer_one = shape[:, d - 1] == 1
            inner_one = (shape[:, d] == 1) & ~outer_one
            dense = np.ones(len(shape), dtype=bool)
            for s in strides.values():
                dense &= s[:, d - 1] == s[:, d] * shape[:, d]
            for s in strides.values():
                s[:, d] = np.where(inner_one, s[:, d - 1], s[:, d])
            fold = (dense | inner_one) & ~outer_one
            shape[:, d] = np.where(fold, shape[:, d] * shape[:, d - 1], shape[:, d])
            shape[:, d - 1] = np.where(fold, 1, shape[:, d - 1])
            # After a fold everything further left moves one step right.
            for e in range(d - 1, 0, -1):
                shape[:, e] = np.where(fold, shape[:, e - 1], shape[:, e])
                for s in strides.values():
                    s[:, e] = np.where(fold, s[:, e - 1], s[:, e])
            shape[:, 0] = np.where(fold, 1, shape[:, 0])
    return shape, strides


def to_rows(table: PieceTable, sides: tuple[str, ...] = ("src", "dst")) -> Rows:
    """Flattens pieces to rows that are as long as the named ``sides`` allow.

    Args:
        table: Pieces of any rank.
        sides: Which of ``"src"``, ``"dst"``, ``"index"`` must be honoured.

    Returns:
        Rows; a piece with more than two irreducible dimensions becomes several entries.
    """
    views = _sides(table)
    shape, strides = _merge_dims(table.shape, {s: views[s][1] for s in sides})
    n, rank = shape.shape
    if rank == 0:
        # Scalars: one row of one element.
        shape = np.ones((n, 1), np.int64)
        strides = {s: np.ones((n, 1), np.int64) for s in sides}
        rank = 1
    lead = shape[:, : max(rank - 2, 0)].prod(axis=1) if rank > 2 else np.ones(n, np.int64)
    lead = np.where((shape == 0).any(axis=1), 0, lead)
    piece = np.repeat(np.arange(n, dtype=np.int64), lead)
    first = np.cumsum(lead) - lead
    step = np.arange(len(piece), dtype=np.int64) - first[piece]
    start = {s: views[s][0][piece].copy() for s in sides}
    for d in range(rank - 3, -1, -1):
        size = shape[piece, d]
        coordinate = step % size
        step = step // size
        for s in sides:
            start[s] += coordinate * strides[s][piece, d]
    outer = shape[piece, -2] if rank > 1 else np.ones(len(piece), np.int64)
    return Rows(
        piece=piece,
        outer=outer,
        inner=shape[piece, -1],
        start=start,
        outer_step={
            s: strides[s][piece, -2] if rank > 1 else np.zeros(len(piece), np.int64) for s in sides
        },
        inner_step={s: strides[s][piece, -1] for s in sides},
    )
