"""Digest on CPU: compiled loops over tiles, reading each element once and keeping nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numba import njit
from numpy.typing import NDArray

from weight_sync.dtypes import itemsize
from weight_sync.kernels.base import RawBuffer, Side
from weight_sync.kernels.buffers import addresses, check_cast, check_side, check_slots
from weight_sync.kernels.casts import KINDS, cast_bits
from weight_sync.kernels.mix import C1, C2, C3
from weight_sync.kernels.native import load1, load2, load4
from weight_sync.kernels.parallel import in_threads
from weight_sync.kernels.pieces import PieceTable
from weight_sync.kernels.tiles import cut_tiles, halves

if TYPE_CHECKING:
    import torch

_TILE = 1 << 18
_C1, _C2, _C3 = np.uint32(C1), np.uint32(C2), np.uint32(C3)
_ONE = np.uint64(1)


@njit(inline="always")
def _mixed(bits: int, product: np.uint32) -> np.uint64:
    """``(u + 1) * weight(i)`` from the combined index products (see ``mix.weights``).

    Truncated to 32 bits by hand: numba widens, and wider steps halve the vector width.
    """
    x = np.uint32(product ^ (product >> np.uint32(15)))
    x = np.uint32(x * _C2)
    x = np.uint32(x ^ (x >> np.uint32(13)))
    return (np.uint64(bits) + _ONE) * np.uint64(x | np.uint32(1))


@njit(inline="always")
def _term(bits: int, index: np.uint64) -> np.uint64:
    low = np.uint32(np.uint32(index) * _C1)
    high = np.uint32(np.uint32(index >> np.uint64(32)) * _C3)
    return _mixed(bits, np.uint32(low ^ high))


@njit(inline="always")
def _load(address: int, index: int, size: int) -> np.uint32:
    if size == 1:
        return np.uint32(load1(address, index))
    if size == 2:
        return np.uint32(load2(address, index))
    return np.uint32(load4(address, index))


@njit(inline="always")
def _dense(address: int, count: int, index: np.uint64, size: int) -> np.uint64:
    """Neighbours in memory and in the tensor, none of them across a multiple of 2**32."""
    low = np.uint32(np.uint32(index) * _C1)
    high = np.uint32(np.uint32(index >> np.uint64(32)) * _C3)
    total = np.uint64(0)
    for i in range(count):
        product = np.uint32(np.uint32(low + np.uint32(np.uint32(i) * _C1)) ^ high)
        total += _mixed(_load(address, i, size), product)
    return total


@njit(inline="always")
def _row(
    address: int, count: int, step: int, index: np.uint64, index_step: int, size: int
) -> np.uint64:
    total = np.uint64(0)
    if step == size and index_step == 1:
        done = np.int64(0)
        while done < count:
            at = index + np.uint64(done)
            room = np.int64(0x100000000) - np.int64(at & np.uint64(0xFFFFFFFF))
            part = min(count - done, room)
            total += _dense(address + done * size, part, at, size)
            done += part
        return total
    for i in range(count):
        at = index + np.uint64(i * index_step)
        total += _term(_load(address + i * step, 0, size), at)
    return total


@njit(cache=True, nogil=True)
def _digest(
    tiles: NDArray[np.int64], size: int, sums: NDArray[np.uint64], first: int, last: int
) -> None:
    for t in range(first, last):
        address, rows, inner, outer, step, index, index_outer, index_step = tiles[t]
        total = np.uint64(0)
        for r in range(rows):
            a, at = address + r * outer, np.uint64(index + r * index_outer)
            # One call per size: the size is then a constant in each loop.
            if size == 1:
                total += _row(a, inner, step, at, index_step, 1)
            elif size == 2:
                total += _row(a, inner, step, at, index_step, 2)
            else:
                total += _row(a, inner, step, at, index_step, 4)
        sums[t] = total


@njit(cache=True, nogil=True)
def _digest_cast(
    tiles: NDArray[np.int64],
    size: int,
    src_kind: int,
    dst_kind: int,
    sums: NDArray[np.uint64],
    first: int,
    last: int,
) -> None:
    for t in range(first, last):
        address, rows, inner, outer, step, index, index_outer, index_step = tiles[t]
        total = np.uint64(0)
        for r in range(rows):
            for i in range(inner):
                at = np.uint64(index + r * index_outer + i * index_step)
                bits = _load(address + r * outer + i * step, 0, size)
                total += _term(cast_bits(bits, src_kind, dst_kind), at)
        sums[t] = total


class CpuDigest:
    """See :func:`weight_sync.kernels.compiler.compile_digest`."""

    def __init__(
        self,
        tables: Sequence[PieceTable],
        buffers: Sequence[torch.Tensor | RawBuffer],
        side: Side,
        slots: int,
    ) -> None:
        self._slots = slots
        # The tiles hold plain addresses: what they point into must outlive them.
        self._keep = tuple(buffers)
        base, sizes = addresses(buffers)
        self._work = []
        for table in tables:
            check_cast(table)
            check_side(table, side, sizes)
            check_slots(table, slots)
            cast = side == "src" and table.src_dtype != table.dst_dtype
            words = halves(table) if itemsize(table.dst_dtype) == 8 else table
            tiles = cut_tiles(words, {side: base}, _TILE, index=True)
            packed = np.stack(
                [
                    tiles.start[side],
                    tiles.rows,
                    tiles.inner,
                    tiles.outer_step[side],
                    tiles.inner_step[side],
                    tiles.start["index"],
                    tiles.outer_step["index"],
                    tiles.inner_step["index"],
                ],
                axis=1,
            )
            size = itemsize(words.src_dtype if side == "src" else words.dst_dtype)
            sums = np.zeros(len(tiles), np.uint64)
            if cast:
                kinds = KINDS[table.src_dtype], KINDS[table.dst_dtype]
                loop = partial(_digest_cast, packed, size, *kinds, sums)
            else:
                loop = partial(_digest, packed, size, sums)
            self._work.append((loop, tiles.rows * tiles.inner * size, sums, tiles.slot))

    def run(self) -> NDArray[np.uint64]:
        """Computes the digests, uint64 ``[slots]``."""
        result = np.zeros(self._slots, np.uint64)
        for loop, weight, sums, slot in self._work:
            in_threads(loop, weight)
            np.add.at(result, slot, sums)
        return result
