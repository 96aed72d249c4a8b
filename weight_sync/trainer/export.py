"""Makes a trainer rank's storages reachable for other processes of the host, once per storage.

CPU storages become shared memory in place (torch's own mechanism): every view of them keeps working
and nothing is left in the file system. CUDA storages get an IPC handle of the allocation they lie
in; those that can have none (expandable segments, virtual-memory pools) are left to the staging
ring.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weight_sync.arrays import pack
from weight_sync.device_memory import plain_memory
from weight_sync.errors import EnvironmentUnsupportedError
from weight_sync.messages import Exports, StorageHandle

logger = logging.getLogger(__name__)

# Descriptors kept free for everything else the process opens.
_SPARE_DESCRIPTORS = 256


@dataclass(frozen=True)
class LocalRegions:
    """A rank's region tensors at one generation, with the storages they lie in.

    Attributes:
        tensors: One per region.
        storages: Distinct storages as 1-D uint8 tensors.
        storage: Index into ``storages`` per region.
    """

    tensors: tuple[torch.Tensor, ...]
    storages: tuple[torch.Tensor, ...]
    storage: tuple[int, ...]


def collect(tensors: Sequence[torch.Tensor]) -> LocalRegions:
    """Groups region tensors by storage."""
    index: dict[int, int] = {}
    storages: list[torch.Tensor] = []
    owner: list[int] = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        at = index.setdefault(storage._cdata, len(storages))
        if at == len(storages):
            storages.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        owner.append(at)
    return LocalRegions(tuple(tensors), tuple(storages), tuple(owner))


def _share_cpu(storage: torch.Tensor) -> StorageHandle:
    descriptor, nbytes = storage.untyped_storage()._share_fd_cpu_()
    inode = os.fstat(descriptor).st_ino
    return StorageHandle("shm", nbytes, pid=os.getpid(), descriptor=descriptor, inode=inode)


def share_storage(nbytes: int, device: torch.device) -> tuple[torch.Tensor, StorageHandle]:
    """New memory that a peer can map, with its handle.

    On CUDA it comes from a plain allocation outside torch's pool, so it can be exported even where
    the trainer's own allocator cannot.
    """
    memory = plain_memory(nbytes, device)
    return memory, _share_cpu(memory) if device.type == "cpu" else share_cuda(memory)


def _descriptor_budget() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    used = len(os.listdir("/proc/self/fd"))
    return hard - used - _SPARE_DESCRIPTORS


class Exporter:
    """Exports each storage once and remembers it until the generation changes."""

    def __init__(self) -> None:
        self._handles: dict[int, StorageHandle] = {}
        # Storages that can have no handle.
        self._without: set[int] = set()
        self._warned = False

    def export(self, regions: LocalRegions, generation: int, *, accelerator: bool) -> Exports:
        """Handles and layout of every region.

        Args:
            regions: The rank's region tensors.
            generation: Stamped on the result.
            accelerator: Whether engine workers read device memory; CPU tensors are then staged.

        Returns:
            Exports in which regions that cannot be mapped are left out, to be staged.
        """
        handles: list[StorageHandle] = []
        place: dict[int, int] = {}
        fresh = sum(1 for s in regions.storages if s.data_ptr() not in self._handles)
        room = fresh <= _descriptor_budget()
        for number, storage in enumerate(regions.storages):
            if storage.numel() == 0:
                continue
            key = storage.data_ptr()
            if storage.device.type == "cuda":
                if key not in self._handles and not self._export_cuda(key, storage):
                    continue
            elif accelerator or not room:
                continue
            elif key not in self._handles:
                handle = _share_cpu(storage)
                key = storage.data_ptr()
                self._handles[key] = handle
            place[number] = len(handles)
            handles.append(self._handles[key])
        width = max((t.dim() for t in regions.tensors), default=1) or 1
        stride = np.zeros((len(regions.tensors), width), np.int64)
        for i, tensor in enumerate(regions.tensors):
            if tensor.dim():
                stride[i, width - tensor.dim() :] = tensor.stride()
        return Exports(
            generation=generation,
            storages=tuple(handles),
            storage=pack(np.array([place.get(s, -1) for s in regions.storage], np.int32)),
            offset=pack(np.array([t.storage_offset() for t in regions.tensors], np.int64)),
            stride=pack(stride),
            dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in regions.tensors),
        )

    def _export_cuda(self, key: int, storage: torch.Tensor) -> bool:
        if key in self._without:
            return False
        try:
            self._handles[key] = share_cuda(storage)
        except EnvironmentUnsupportedError as error:
            self._without.add(key)
            if not self._warned:
                self._warned = True
                logger.warning("weights are staged through a buffer, which is slower: %s", error)
            return False
        return True

    def forget(self) -> None:
        """Drops handles after storages moved."""
        self._handles.clear()
        self._without.clear()


def share_cuda(storage: torch.Tensor) -> StorageHandle:
    """IPC handle of a CUDA storage.

    Args:
        storage: A whole storage, 1-D uint8.

    Raises:
        EnvironmentUnsupportedError: If it can have none, with the setting to change.
    """
    from weight_sync.cuda_ipc import export_address

    try:
        handle, offset = export_address(storage.data_ptr(), storage.device.index)
    except RuntimeError as error:
        raise EnvironmentUnsupportedError(
            f"CUDA IPC cannot export {storage.numel()} bytes on {storage.device}: {error}. Memory "
            "from expandable segments or a virtual-memory pool has no IPC handle: unset "
            "expandable_segments in PYTORCH_CUDA_ALLOC_CONF (or PYTORCH_ALLOC_CONF) for the "
            "trainer, or use the broadcast or reshard transport. `python -m weight_sync doctor` "
            "shows what works here."
        ) from error
    from weight_sync.identity import device_identity

    return StorageHandle(
        "cuda",
        storage.numel(),
        pid=os.getpid(),
        handle=handle,
        offset=offset,
        device=device_identity(storage.device.index),
    )
