"""A two-slot staging ring: packs what cannot be exported while the previous bucket is read."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.buckets import Buckets, cut
from weight_sync.dtypes import itemsize
from weight_sync.errors import RefitError
from weight_sync.kernels.base import compile_copy
from weight_sync.kernels.pieces import PieceTable
from weight_sync.layout import contiguous_strides
from weight_sync.manifest import Manifest, widen
from weight_sync.messages import Staged, StorageHandle
from weight_sync.program import SendTask
from weight_sync.trainer.export import LocalRegions, share_storage

I64 = NDArray[np.int64]


@dataclass
class _Slot:
    memory: torch.Tensor
    handle: StorageHandle
    pinned: torch.Tensor | None = None


class Ring:
    """The stream of one trainer rank to one worker, in the receiver's order.

    Asking for bucket ``k`` says that bucket ``k - 2`` was read, so its slot is packed again.

    Args:
        task: The pieces of the stream.
        rows: Which of them are staged.
        manifest: The rank's manifest.
        bucket_bytes: Where buckets are cut.
        device: Where slots live: the reader maps them.
    """

    def __init__(
        self,
        task: SendTask,
        rows: I64,
        manifest: Manifest,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        self._device = device
        self._region = task.region.unpack().astype(np.int64)[rows]
        self._offset = task.offset.unpack().astype(np.int64)[rows]
        self._size = task.size.unpack().astype(np.int64)[rows]
        owner = manifest.owner.unpack()[self._region]
        self._wire = [manifest.tensors[int(o)].dtype for o in owner]
        self._item = np.array([itemsize(d) for d in self._wire], np.int64)
        width = self._offset.shape[1]
        self._origin = widen(manifest.offset.unpack().astype(np.int64), width, 0)
        self._buckets: Buckets = cut(
            self._size.prod(axis=1) * self._item,
            task.unit.unpack()[rows].astype(np.int32),
            bucket_bytes,
        )
        self._slots: dict[int, _Slot] = {}
        self._next: tuple[int, int] = (-1, 0)
        self._lock = threading.Lock()

    def stage(self, version: int, bucket: int, regions: LocalRegions) -> Staged:
        """Packs a bucket of a version into its slot.

        Raises:
            RefitError: If buckets are asked for out of order.
        """
        with self._lock:
            expected = self._next[1] if self._next[0] == version else 0
            if bucket != expected or bucket >= self._buckets.count:
                raise RefitError(
                    f"bucket {bucket} was asked for where {expected} of {self._buckets.count} is next",
                    stage="transfer",
                    version=version,
                )
            slot = self._slot(bucket % 2, int(self._buckets.nbytes[bucket]))
            self._pack(np.flatnonzero(self._buckets.bucket == bucket), slot, regions)
            self._next = (version, bucket + 1)
            return Staged(slot.handle, self._buckets.count)

    def _slot(self, number: int, nbytes: int) -> _Slot:
        held = self._slots.get(number)
        if held is None or held.memory.numel() < nbytes:
            # An oversized bucket gets memory of its own size; it replaces the slot.
            self._slots.pop(number, None)
            memory, handle = share_storage(nbytes, self._device)
            held = self._slots[number] = _Slot(memory, handle)
        return held

    def _pack(self, rows: I64, slot: _Slot, regions: LocalRegions) -> None:
        tables = []
        groups: dict[tuple[str, str], list[int]] = {}
        for row in rows.tolist():
            local = regions.tensors[int(self._region[row])]
            src = str(local.dtype).removeprefix("torch.")
            groups.setdefault((src, self._wire[row]), []).append(row)
        width = self._offset.shape[1]
        for (src, dst), members in groups.items():
            stride = np.zeros((len(members), width), np.int64)
            start = np.zeros(len(members), np.int64)
            owner = np.zeros(len(members), np.int32)
            for i, row in enumerate(members):
                number = int(self._region[row])
                local = regions.tensors[number]
                if local.dim():
                    stride[i, width - local.dim() :] = local.stride()
                inside = self._offset[row] - self._origin[number]
                start[i] = local.storage_offset() + int((inside * stride[i]).sum())
                owner[i] = regions.storage[number]
            size = self._size[members]
            packed = np.array([contiguous_strides(tuple(s)) for s in size.tolist()], np.int64)
            zero = np.zeros(len(members), np.int64)
            tables.append(
                PieceTable(
                    src_dtype=src,
                    dst_dtype=dst,
                    shape=size,
                    src_buffer=owner,
                    src_offset=start,
                    src_stride=stride,
                    dst_buffer=np.zeros(len(members), np.int32),
                    dst_offset=self._buckets.offset[members] // self._item[members],
                    dst_stride=packed,
                    index_offset=zero,
                    index_stride=packed,
                    slot=zero.astype(np.int32),
                )
            )
        offloaded = slot.memory.is_cuda and not regions.storages[0].is_cuda
        if offloaded and (slot.pinned is None or slot.pinned.numel() < slot.memory.numel()):
            slot.pinned = torch.empty(slot.memory.numel(), dtype=torch.uint8, pin_memory=True)
        target = slot.pinned if offloaded and slot.pinned is not None else slot.memory
        compile_copy(tables, regions.storages, [target]).run()
        if target is not slot.memory:
            slot.memory.copy_(target, non_blocking=True)
        if slot.memory.is_cuda:
            torch.cuda.current_stream(slot.memory.device).synchronize()

    def close(self) -> None:
        """Frees the slots."""
        self._slots.clear()
