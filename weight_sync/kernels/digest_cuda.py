"""Digest on CUDA: one read of the bytes, one launch per element type."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weight_sync.dtypes import itemsize
from weight_sync.kernels.base import RawBuffer, Side
from weight_sync.kernels.buffers import addresses, check_cast, check_side, check_slots
from weight_sync.kernels.cuda_module import launch, load, one_device
from weight_sync.kernels.pieces import PieceTable
from weight_sync.kernels.tiles import cut_tiles, halves, tile_bytes, total_bytes

if TYPE_CHECKING:
    import torch


class CudaDigest:
    """See :func:`weight_sync.kernels.compiler.compile_digest`."""

    def __init__(
        self,
        tables: Sequence[PieceTable],
        buffers: Sequence[torch.Tensor | RawBuffer],
        side: Side,
        slots: int,
    ) -> None:
        import torch

        self._device = one_device(buffers, side)
        # The tiles hold plain addresses: what they point into must outlive them.
        self._keep = tuple(buffers)
        base, sizes = addresses(buffers)
        length = tile_bytes(total_bytes(tables))
        parts: dict[str, list[NDArray[np.int64]]] = defaultdict(list)
        for table in tables:
            check_cast(table)
            check_side(table, side, sizes)
            check_slots(table, slots)
            words = halves(table) if itemsize(table.dst_dtype) == 8 else table
            size = itemsize(words.src_dtype if side == "src" else words.dst_dtype)
            cast = side == "src" and table.src_dtype != table.dst_dtype
            kernel = f"{table.src_dtype}_{table.dst_dtype}" if cast else str(size)
            tiles = cut_tiles(words, {side: base}, length // size, index=True)
            columns = [
                tiles.start[side],
                tiles.rows,
                tiles.inner,
                tiles.outer_step[side],
                tiles.inner_step[side],
                tiles.start["index"],
                tiles.outer_step["index"],
                tiles.inner_step["index"],
                tiles.slot,
            ]
            parts[f"digest_{kernel}"].append(np.stack(columns, axis=1))
        self._sums = torch.zeros(slots, dtype=torch.int64, device=f"cuda:{self._device}")
        # Pinned, and waited for by an event: a pageable copy keeps the driver's lock until the
        # kernels are done, and every other thread of the process would wait with it.
        self._host = torch.zeros(slots, dtype=torch.int64, pin_memory=True)
        self._launches = []
        for function, pieces in parts.items():
            packed = np.concatenate(pieces)
            if len(packed):
                on_device = torch.from_numpy(packed).to(self._sums.device)
                kernel = load(("common.cuh", "digest.cu"), function, self._device)
                self._launches.append((kernel, on_device))

    def run(self) -> NDArray[np.uint64]:
        """Computes the digests after the work already on torch's current stream, and waits."""
        import torch

        self._sums.zero_()
        for kernel, tiles in self._launches:
            pointers = [tiles.data_ptr(), self._sums.data_ptr()]
            launch(kernel, self._device, None, len(tiles), pointers)
        with torch.cuda.device(self._device):
            self._host.copy_(self._sums, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
            done.synchronize()
        return self._host.numpy().view(np.uint64).copy()
