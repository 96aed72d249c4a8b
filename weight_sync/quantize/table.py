"""The batch table the CUDA kernels read: one launch quantizes every tensor of a bucket.

Pure arithmetic on addresses, so that who touches which element is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from weight_sync.layout import contiguous_strides
from weight_sync.quantize.format import MX_BLOCK, TILE, Format

# Elements per thread block: two rounds of 256 threads with four groups of eight each, small enough
# that one ordinary weight fills the GPU, large enough that the table stays a few MB for any model.
TILE_ELEMENTS = 1 << 14
_GROUP = 8


@dataclass(frozen=True)
class Operand:
    """One tensor to quantize, by address.

    Attributes:
        size: ``[..., N, K]``.
        stride: Elements, one per dimension; 1 for K.
        source: Address of the first source element.
        value: Address of the row-major E4M3 bytes.
        scale: Address of the row-major scales.
        slot: First counter of this tensor; FP8 per tensor uses one per matrix.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    source: int
    value: int
    scale: int
    slot: int


@dataclass(frozen=True)
class Matrix:
    """A part of an operand with one row stride. Addresses as in :class:`Operand`."""

    rows: int
    cols: int
    row_stride: int
    source: int
    value: int
    scale: int
    slot: int


@dataclass(frozen=True)
class JobTable:
    """What a launch reads.

    Attributes:
        jobs: int64 ``[jobs, 12]``, ``struct Job`` of ``quantize.cuh``, field by field.
        tile_job: int32 ``[tiles]``, the job of each thread block.
    """

    jobs: NDArray[np.int64]
    tile_job: NDArray[np.int32]


def matrices(form: Format, operand: Operand, itemsize: int) -> Iterator[Matrix]:
    """Cuts an operand into matrices, as few and with rows as long as its strides and scales allow.

    Args:
        form: Decides what may be joined: scales must stay where ``format.scale_shape`` puts them.
        operand: The tensor.
        itemsize: Bytes per source element.
    """
    *lead, rows, cols = operand.size
    *lead_stride, row_stride, _ = operand.stride
    scale_rows, scale_cols = rows, cols // MX_BLOCK
    if form is Format.FP8_BLOCK:
        scale_rows, scale_cols = -(-rows // TILE), -(-cols // TILE)
    if form is Format.MXFP8 and operand.stride == contiguous_strides(operand.size):
        lead, lead_stride, rows, row_stride = [], [], prod(operand.size[:-1]), cols
    per_matrix = rows * cols
    scale_bytes = {
        Format.MXFP8: scale_rows * scale_cols,
        Format.FP8_BLOCK: 4 * scale_rows * scale_cols,
        Format.FP8_TENSOR: 4,
    }[form]
    joined = form is not Format.FP8_BLOCK and row_stride == cols
    for number, at in enumerate(np.ndindex(*lead)):
        offset = sum(i * s for i, s in zip(at, lead_stride, strict=True))
        yield Matrix(
            rows=1 if joined else rows,
            cols=per_matrix if joined else cols,
            row_stride=per_matrix if joined else row_stride,
            source=operand.source + offset * itemsize,
            value=operand.value + number * per_matrix,
            scale=operand.scale + number * scale_bytes,
            slot=operand.slot + (number if form is Format.FP8_TENSOR else 0),
        )


def job_table(form: Format, parts: Sequence[Matrix], itemsize: int) -> JobTable:
    """Lays tiles over matrices.

    Args:
        form: The format; FP8 blocks fix the tile at 128x128.
        parts: Matrices, of one source dtype.
        itemsize: Bytes per source element.
    """
    rows = np.array([m.rows for m in parts], np.int64)
    cols = np.array([m.cols for m in parts], np.int64)
    stride = np.array([m.row_stride for m in parts], np.int64)
    source = np.array([m.source for m in parts], np.int64)
    value = np.array([m.value for m in parts], np.int64)
    if form is Format.FP8_BLOCK:
        tile_rows = tile_cols = np.full(len(parts), TILE, np.int64)
    else:
        tile_cols = np.clip(cols, 1, TILE_ELEMENTS)
        tile_rows = TILE_ELEMENTS // tile_cols
    across = -(-cols // tile_cols)
    tiles = across * -(-rows // tile_rows)
    if form is Format.FP8_TENSOR:
        # An empty matrix has a scale all the same, written by its first thread block.
        tiles, across = np.maximum(tiles, 1), np.maximum(across, 1)
    one_row = rows == 1
    wide = (source % 16 == 0) & (value % 8 == 0)
    wide &= one_row | ((stride * itemsize % 16 == 0) & (cols % _GROUP == 0))
    jobs = np.stack(
        [
            source,
            value,
            np.array([m.scale for m in parts], np.int64),
            rows,
            cols,
            stride,
            np.cumsum(tiles) - tiles,
            across,
            tile_rows,
            tile_cols,
            np.array([m.slot for m in parts], np.int64),
            wide.astype(np.int64),
        ],
        axis=1,
    )
    return JobTable(jobs, np.repeat(np.arange(len(parts), dtype=np.int32), tiles))
