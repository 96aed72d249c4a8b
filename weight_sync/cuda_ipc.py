"""CUDA inter-process memory handles: exported by the owner, opened on the reader's device."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@contextmanager
def _context(device: int) -> Iterator[None]:
    """Makes the device's primary context current, also in a thread that never used CUDA.

    Naming the device is not enough: the runtime binds the context at its first real call, and the
    driver's own functions refuse a thread without one.
    """
    import cupy

    with cupy.cuda.Device(device):
        cupy.cuda.runtime.setDevice(device)
        cupy.cuda.runtime.free(0)
        yield


def allocation_of(address: int) -> tuple[int, int]:
    """Start and length of the allocation that holds ``address`` (cuMemGetAddressRange).

    Raises:
        RuntimeError: If the driver does not know the address as one plain allocation.
    """
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    code = _driver().cuMemGetAddressRange_v2(
        ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    if code:
        raise RuntimeError(f"cuMemGetAddressRange failed with code {code}")
    return base.value, size.value


def export_address(address: int, device: int) -> tuple[bytes, int]:
    """IPC handle of the allocation that holds ``address``, and the offset in it.

    Raises:
        RuntimeError: If the memory has no IPC handle.
    """
    import cupy

    with _context(device):
        base, _ = allocation_of(address)
        handle = cupy.cuda.runtime.ipcGetMemHandle(base)
    return bytes(handle), address - base


class OpenHandles:
    """Handles opened on one device; each allocation is opened once and closed with the object.

    CUDA refuses to open a handle twice in one process, and one allocation holds many storages.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self._open: dict[bytes, int] = {}
        self._lock = threading.Lock()
        self.opened = 0
        self.closed = 0

    def address(self, handle: bytes, offset: int) -> tuple[int, int]:
        """Device pointer of ``offset`` in the handle's allocation, and the bytes from there on.

        Any thread may call it: the driver is asked with this device's context made current.

        Raises:
            RuntimeError: If the driver cannot open the handle.
        """
        import cupy

        with self._lock, _context(self.device):
            if handle not in self._open:
                self._open[handle] = cupy.cuda.runtime.ipcOpenMemHandle(handle)
                self.opened += 1
            address = self._open[handle] + offset
            base, size = allocation_of(address)
            return address, base + size - address

    def close(self) -> None:
        """Closes all handles; nothing may read them any more. Safe twice."""
        import cupy

        with self._lock, _context(self.device):
            for address in self._open.values():
                cupy.cuda.runtime.ipcCloseMemHandle(address)
                self.closed += 1
            self._open.clear()
