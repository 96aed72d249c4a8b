"""Batched copy on CPU: one compiled loop over all tiles, whatever buffers they live in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numba import njit
from numpy.typing import NDArray

from weight_sync.dtypes import itemsize
from weight_sync.kernels.base import RawBuffer
from weight_sync.kernels.buffers import addresses, check_cast, check_side
from weight_sync.kernels.casts import BFLOAT16, FLOAT16, FLOAT32, KINDS, cast_bits
from weight_sync.kernels.native import (
    copy_block,
    load1,
    load2,
    load4,
    load8,
    store1,
    store2,
    store4,
    store8,
)
from weight_sync.kernels.parallel import in_threads
from weight_sync.kernels.pieces import PieceTable
from weight_sync.kernels.tiles import cut_tiles, total_bytes

if TYPE_CHECKING:
    import torch

# Elements per tile: long rows are shared by threads, and a tile stays in the second-level cache.
_TILE = 1 << 18


@njit(cache=True, nogil=True)
def _copy(tiles: NDArray[np.int64], size: int, first: int, last: int) -> None:
    for t in range(first, last):
        src, dst, rows, inner, src_outer, dst_outer, src_inner, dst_inner = tiles[t]
        if inner == 1 or (src_inner == size and dst_inner == size):
            for r in range(rows):
                copy_block(dst + r * dst_outer, src + r * src_outer, inner * size)
            continue
        for r in range(rows):
            a, b = src + r * src_outer, dst + r * dst_outer
            if size == 1:
                for i in range(inner):
                    store1(b + i * dst_inner, 0, load1(a + i * src_inner, 0))
            elif size == 2:
                for i in range(inner):
                    store2(b + i * dst_inner, 0, load2(a + i * src_inner, 0))
            elif size == 4:
                for i in range(inner):
                    store4(b + i * dst_inner, 0, load4(a + i * src_inner, 0))
            else:
                for i in range(inner):
                    store8(b + i * dst_inner, 0, load8(a + i * src_inner, 0))


@njit(cache=True, nogil=True)
def _cast(tiles: NDArray[np.int64], src_kind: int, dst_kind: int, first: int, last: int) -> None:
    for t in range(first, last):
        src, dst, rows, inner, src_outer, dst_outer, src_inner, dst_inner = tiles[t]
        for r in range(rows):
            a, b = src + r * src_outer, dst + r * dst_outer
            if src_kind == FLOAT32 and dst_kind == BFLOAT16 and src_inner == 4 and dst_inner == 2:
                # The common cast, from a trainer's master weights; written so that it vectorizes.
                for i in range(inner):
                    store2(b, i, np.uint16(cast_bits(load4(a, i), FLOAT32, BFLOAT16)))
            elif src_kind == FLOAT32 and dst_kind == FLOAT16:
                for i in range(inner):
                    value = cast_bits(load4(a + i * src_inner, 0), FLOAT32, FLOAT16)
                    store2(b + i * dst_inner, 0, np.uint16(value))
            elif src_kind == FLOAT32:
                for i in range(inner):
                    value = cast_bits(load4(a + i * src_inner, 0), FLOAT32, BFLOAT16)
                    store2(b + i * dst_inner, 0, np.uint16(value))
            elif dst_kind == FLOAT32:
                for i in range(inner):
                    value = cast_bits(load2(a + i * src_inner, 0), src_kind, FLOAT32)
                    store4(b + i * dst_inner, 0, value)
            else:
                for i in range(inner):
                    value = cast_bits(load2(a + i * src_inner, 0), src_kind, dst_kind)
                    store2(b + i * dst_inner, 0, np.uint16(value))


class CpuCopy:
    """See :func:`weight_sync.kernels.compiler.compile_copy`."""

    def __init__(
        self,
        tables: Sequence[PieceTable],
        src: Sequence[torch.Tensor | RawBuffer],
        dst: Sequence[torch.Tensor | RawBuffer],
    ) -> None:
        self.nbytes = total_bytes(tables)
        # The tiles hold plain addresses: what they point into must outlive them.
        self._keep = (tuple(src), tuple(dst))
        src_base, src_size = addresses(src)
        dst_base, dst_size = addresses(dst)
        self._work = []
        for table in tables:
            check_cast(table)
            check_side(table, "src", src_size)
            check_side(table, "dst", dst_size)
            tiles = cut_tiles(table, {"src": src_base, "dst": dst_base}, _TILE, index=False)
            packed = np.stack(
                [
                    tiles.start["src"],
                    tiles.start["dst"],
                    tiles.rows,
                    tiles.inner,
                    tiles.outer_step["src"],
                    tiles.outer_step["dst"],
                    tiles.inner_step["src"],
                    tiles.inner_step["dst"],
                ],
                axis=1,
            )
            size = itemsize(table.dst_dtype)
            if table.src_dtype == table.dst_dtype:
                loop = partial(_copy, packed, size)
            else:
                loop = partial(_cast, packed, KINDS[table.src_dtype], KINDS[table.dst_dtype])
            self._work.append((loop, tiles.rows * tiles.inner * size))

    def run(self, stream: int | None = None) -> None:
        """Copies every piece; the bytes are there on return. ``stream`` has no meaning here."""
        for loop, weight in self._work:
            in_threads(loop, weight)
