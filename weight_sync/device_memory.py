"""Memory that other processes can map, whatever the trainer's own allocator is."""

from __future__ import annotations

import torch


def plain_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    """New uninitialized memory, 1-D uint8 of at least one byte.

    On CUDA it is an allocation of its own outside torch's pool: memory of expandable segments or of
    a virtual-memory pool has no IPC handle. It is freed when nothing refers to it any more.
    """
    size = max(nbytes, 1)
    if device.type == "cpu":
        return torch.empty(size, dtype=torch.uint8)
    import cupy

    with cupy.cuda.Device(device.index):
        try:
            block = cupy.cuda.memory.Memory(size)
        except (cupy.cuda.memory.OutOfMemoryError, cupy.cuda.runtime.CUDARuntimeError):
            # What torch keeps for later is free memory all the same.
            torch.cuda.empty_cache()
            block = cupy.cuda.memory.Memory(size)
        array = cupy.ndarray(size, cupy.uint8, cupy.cuda.MemoryPointer(block, 0))
        return torch.from_dlpack(array)
