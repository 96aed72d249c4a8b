"""Batched copy on CUDA: at most one launch per kind of tile, from tables already on the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weight_sync.dtypes import itemsize
from weight_sync.kernels.base import RawBuffer, Side
from weight_sync.kernels.buffers import addresses, check_cast, check_side
from weight_sync.kernels.cuda_module import allow_peers, launch, load, one_device
from weight_sync.kernels.pieces import PieceTable
from weight_sync.kernels.tiles import Tiles, cut_tiles, tile_bytes, total_bytes

if TYPE_CHECKING:
    import torch

I64 = NDArray[np.int64]


def _dense_rows(tiles: Tiles, size: int) -> I64:
    """Tiles as ``copy_rows`` of cuda/copy.cu reads them."""
    steps = tiles.outer_step
    columns = [tiles.start["src"], tiles.start["dst"], tiles.rows, tiles.inner * size]
    return np.stack([*columns, steps["src"], steps["dst"]], axis=1)


def _elements(tiles: Tiles) -> I64:
    """Tiles as the kernels of cuda/elements.cu read them.

    Threads follow the dimension in which the destination is densest, so that stores coalesce.
    """
    outer, inner = tiles.outer_step, tiles.inner_step
    turn = (tiles.rows > 1) & (np.abs(outer["dst"]) < np.abs(inner["dst"]))

    def pick(a: I64, b: I64) -> I64:
        return np.where(turn, b, a)

    return np.stack(
        [
            tiles.start["src"],
            tiles.start["dst"],
            pick(tiles.rows, tiles.inner),
            pick(tiles.inner, tiles.rows),
            pick(outer["src"], inner["src"]),
            pick(outer["dst"], inner["dst"]),
            pick(inner["src"], outer["src"]),
            pick(inner["dst"], outer["dst"]),
        ],
        axis=1,
    )


class CudaCopy:
    """See :func:`weight_sync.kernels.compiler.compile_copy`."""

    def __init__(
        self,
        tables: Sequence[PieceTable],
        src: Sequence[torch.Tensor | RawBuffer],
        dst: Sequence[torch.Tensor | RawBuffer],
    ) -> None:
        import torch

        self.nbytes = total_bytes(tables)
        self._device = one_device(dst, "destination")
        # The tiles hold plain addresses: what they point into must outlive them.
        self._keep = (tuple(src), tuple(dst))
        allow_peers(self._device, src)
        src_base, src_size = addresses(src)
        dst_base, dst_size = addresses(dst)
        length = tile_bytes(self.nbytes)
        work: dict[tuple[str, str], list[I64]] = defaultdict(list)
        for table in tables:
            check_cast(table)
            check_side(table, "src", src_size)
            check_side(table, "dst", dst_size)
            size = itemsize(table.dst_dtype)
            bases: dict[Side, I64] = {"src": src_base, "dst": dst_base}
            tiles = cut_tiles(table, bases, length // size, index=False)
            if table.src_dtype != table.dst_dtype:
                cast = f"cast_{table.src_dtype}_{table.dst_dtype}"
                work["elements.cu", cast].append(_elements(tiles))
                continue
            dense = tiles.dense({"src": size, "dst": size})
            work["copy.cu", "copy_rows"].append(_dense_rows(tiles.take(dense), size))
            work["elements.cu", f"copy_{size}"].append(_elements(tiles.take(~dense)))
        self._launches = []
        for (source, function), pieces in work.items():
            packed = np.concatenate(pieces)
            if len(packed):
                on_device = torch.from_numpy(packed).to(f"cuda:{self._device}")
                kernel = load(("common.cuh", source), function, self._device)
                self._launches.append((kernel, on_device))

    def run(self, stream: int | None = None) -> None:
        """Enqueues the copies on ``stream``, or on torch's current stream of the device."""
        for kernel, tiles in self._launches:
            launch(kernel, self._device, stream, len(tiles), [tiles.data_ptr()])
