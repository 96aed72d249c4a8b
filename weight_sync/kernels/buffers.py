"""Addresses of buffers, and the check that no piece reaches outside its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weight_sync.dtypes import CASTABLE, itemsize
from weight_sync.errors import LayoutError
from weight_sync.kernels.base import RawBuffer, Side
from weight_sync.kernels.pieces import PieceTable

if TYPE_CHECKING:
    import torch

I64 = NDArray[np.int64]

# Offsets beyond this cannot be real, and below it float64 sums are exact enough to notice overflow.
_LARGEST_OFFSET = float(1 << 52)


def addresses(buffers: Sequence[torch.Tensor | RawBuffer]) -> tuple[I64, I64]:
    """First byte and length of every buffer.

    Returns:
        Two int64 ``[len(buffers)]`` arrays: addresses and lengths in bytes.

    Raises:
        LayoutError: If a tensor is not a dense 1-D uint8 tensor.
    """
    starts, sizes = [], []
    for number, buffer in enumerate(buffers):
        if isinstance(buffer, RawBuffer):
            starts.append(buffer.address)
            sizes.append(buffer.nbytes)
            continue
        if str(buffer.dtype) != "torch.uint8" or buffer.dim() != 1 or not buffer.is_contiguous():
            raise LayoutError(
                f"buffer {number} is {buffer.dtype} of shape {tuple(buffer.shape)}; pass the whole "
                "storage as a dense 1-D uint8 tensor"
            )
        starts.append(buffer.data_ptr())
        sizes.append(buffer.numel())
    return np.array(starts, np.int64), np.array(sizes, np.int64)


def check_cast(table: PieceTable) -> None:
    """Refuses dtype pairs that no kernel converts.

    Raises:
        LayoutError: If the dtypes differ and are not both floats of at most 32 bits.
    """
    itemsize(table.src_dtype), itemsize(table.dst_dtype)
    if table.src_dtype != table.dst_dtype and not {table.src_dtype, table.dst_dtype} <= CASTABLE:
        raise LayoutError(
            f"no cast from {table.src_dtype} to {table.dst_dtype} in flight; supported are "
            f"{', '.join(sorted(CASTABLE))}. Convert on the trainer before sending"
        )


def check_side(table: PieceTable, side: Side, sizes: I64) -> None:
    """Checks that every piece lies inside its buffer on one side.

    Args:
        table: Pieces; empty boxes touch nothing and are not looked at.
        side: Which offsets, strides and buffer numbers to check.
        sizes: int64 ``[buffers]``, lengths in bytes.

    Raises:
        LayoutError: Naming the first piece at fault and its buffer.
    """
    offset, stride, buffer, dtype = (
        (table.src_offset, table.src_stride, table.src_buffer, table.src_dtype)
        if side == "src"
        else (table.dst_offset, table.dst_stride, table.dst_buffer, table.dst_dtype)
    )
    if (table.shape < 0).any():
        piece = int(np.flatnonzero((table.shape < 0).any(axis=1))[0])
        raise LayoutError(f"piece {piece} has a negative size {table.shape[piece].tolist()}")
    filled = (table.shape > 0).all(axis=1)
    wrong = filled & ((buffer < 0) | (buffer >= len(sizes)))
    if wrong.any():
        piece = int(np.flatnonzero(wrong)[0])
        raise LayoutError(
            f"piece {piece} names {side} buffer {int(buffer[piece])} of {len(sizes)}; plan and "
            "buffers do not belong together"
        )
    reach = (table.shape.astype(np.float64) - 1) * stride.astype(np.float64)
    low = offset.astype(np.float64) + np.minimum(reach, 0).sum(axis=1)
    high = offset.astype(np.float64) + np.maximum(reach, 0).sum(axis=1) + 1
    size = sizes[np.where(filled, buffer, 0)] if len(sizes) else np.zeros(len(table), np.int64)
    outside = filled & (
        (low < 0) | (high * itemsize(dtype) > size) | (np.abs(high) > _LARGEST_OFFSET)
    )
    if outside.any():
        piece = int(np.flatnonzero(outside)[0])
        raise LayoutError(
            f"piece {piece} covers elements [{low[piece]:.0f}, {high[piece]:.0f}) of {dtype} in "
            f"{side} buffer {int(buffer[piece])}, which holds {int(size[piece])} bytes; the plan "
            "was made for other storage"
        )


def check_slots(table: PieceTable, slots: int) -> None:
    """Checks that every digest slot exists.

    Raises:
        LayoutError: Naming the first piece whose slot is not below ``slots``.
    """
    wrong = (table.slot < 0) | (table.slot >= slots)
    if wrong.any():
        piece = int(np.flatnonzero(wrong)[0])
        raise LayoutError(
            f"piece {piece} adds to digest slot {int(table.slot[piece])} of {slots}; pass the "
            "number of tensors of the plan as slots"
        )
