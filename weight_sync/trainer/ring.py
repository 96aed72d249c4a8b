"""A two-slot staging ring for what a peer cannot map: offloaded weights, memory without a handle.

While the reader copies one bucket, the next is packed into the other slot. Slots are allocations of
their own that can always be exported; host memory reaches a GPU slot through pinned memory.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.buckets import cut
from weight_sync.dtypes import itemsize
from weight_sync.errors import RefitError
from weight_sync.manifest import Manifest
from weight_sync.messages import Staged
from weight_sync.program import SendTask
from weight_sync.trainer.export import LocalRegions, share_storage
from weight_sync.trainer.packer import Bucketed, Packer

I64 = NDArray[np.int64]


class Ring:
    """The stream of one trainer rank to one worker, in the receiver's order.

    Asking for bucket ``k`` says that bucket ``k - 2`` was read, so its slot is packed again.

    Args:
        task: The pieces of the stream.
        rows: Which of them are staged.
        manifest: The rank's manifest.
        bucket_bytes: Where buckets are cut.
        device: Where slots live: the reader maps them.

    Raises:
        EnvironmentUnsupportedError: If not even a slot can be exported.
    """

    def __init__(
        self,
        task: SendTask,
        rows: I64,
        manifest: Manifest,
        bucket_bytes: int,
        device: torch.device,
    ) -> None:
        region = task.region.unpack().astype(np.int64)[rows]
        size = task.size.unpack().astype(np.int64)[rows]
        owner = manifest.owner.unpack()[region]
        item = np.array([itemsize(manifest.tensors[int(o)].dtype) for o in owner], np.int64)
        buckets = cut(
            size.prod(axis=1) * item, task.unit.unpack()[rows].astype(np.int32), bucket_bytes
        )
        self.buckets = buckets.count
        # A bucket that holds one oversized tensor enlarges only the slot it goes to.
        shared = [
            share_storage(int(buckets.nbytes[first::2].max()), device)
            for first in range(min(2, buckets.count))
        ]
        self._handles = [handle for _, handle in shared]
        pieces = Bucketed(
            region=region,
            offset=task.offset.unpack().astype(np.int64)[rows],
            size=size,
            bucket=buckets.bucket,
            start=buckets.offset,
            nbytes=int(buckets.nbytes.max(initial=0)),
        )
        self._packer = Packer(manifest, pieces, device, [memory for memory, _ in shared])
        self._next: tuple[int, int] = (-1, 0)
        self._lock = threading.Lock()

    def stage(self, version: int, bucket: int, regions: LocalRegions, generation: int) -> Staged:
        """Packs a bucket of a version into its slot.

        Args:
            version: The version.
            bucket: Its number in the stream.
            regions: The rank's region tensors.
            generation: Which places they are at.

        Raises:
            RefitError: If buckets are asked for out of order.
        """
        with self._lock:
            expected = self._next[1] if self._next[0] == version else 0
            if bucket not in (0, expected) or bucket >= self.buckets:
                raise RefitError(
                    f"bucket {bucket} was asked for where {expected} of {self.buckets} is next",
                    stage="transfer",
                    version=version,
                )
            self._packer.prepare(regions, generation)
            slot = self._packer.pack(bucket)
            if slot.is_cuda:
                torch.cuda.current_stream(slot.device).synchronize()
            self._next = (version, bucket + 1)
            return Staged(self._handles[bucket % 2], self.buckets)

    def close(self) -> None:
        """Drops everything that refers to weight memory, and the slots."""
        self._packer.forget()
        self._packer.slots.clear()
