"""Maps exported storages into this process."""

from __future__ import annotations

import mmap
import os

import torch

from weight_sync.cuda_ipc import OpenHandles
from weight_sync.errors import EnvironmentUnsupportedError
from weight_sync.identity import device_identity, visible_devices
from weight_sync.kernels.base import RawBuffer
from weight_sync.messages import StorageHandle


class Mapper:
    """Maps storages of other processes, each once, until closed.

    Args:
        device: Where the reader's memory is; CUDA handles are opened on it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._maps: dict[tuple[int, int, int], torch.Tensor] = {}
        self._handles: OpenHandles | None = None
        self._reachable: set[str] = set()

    def map(self, handle: StorageHandle, owner: str) -> torch.Tensor | RawBuffer:
        """The storage as a buffer kernels can read.

        Raises:
            EnvironmentUnsupportedError: Naming what forbids it and the way out.
        """
        if handle.kind == "shm":
            return self._map_shared(handle, owner)
        return self._map_cuda(handle, owner)

    def _map_shared(self, handle: StorageHandle, owner: str) -> torch.Tensor:
        key = (handle.pid, handle.inode, handle.nbytes)
        if key not in self._maps:
            path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
            try:
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    state = os.fstat(descriptor)
                    if state.st_ino != handle.inode or state.st_size < handle.nbytes:
                        raise OSError("the descriptor no longer belongs to the exported storage")
                    view = mmap.mmap(descriptor, handle.nbytes, prot=mmap.PROT_READ)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise EnvironmentUnsupportedError(
                    f"cannot map shared memory of {owner} ({path}): {error}. Trainer and engine "
                    "must run as the same user in the same pid namespace; otherwise use the "
                    "broadcast or reshard transport."
                ) from error
            self._maps[key] = _readonly(view)
        return self._maps[key]

    def _map_cuda(self, handle: StorageHandle, owner: str) -> RawBuffer:
        index = self._device.index or 0
        if handle.pid == os.getpid():
            raise EnvironmentUnsupportedError(
                f"{owner} is this very process; CUDA IPC needs trainer and engine in two processes"
            )
        if handle.device not in self._reachable:
            _require_peer_access(index, handle.device, owner)
            self._reachable.add(handle.device)
        if self._handles is None:
            self._handles = OpenHandles(index)
        try:
            address, room = self._handles.address(handle.handle, handle.offset)
        except RuntimeError as error:
            raise EnvironmentUnsupportedError(
                f"cannot open CUDA memory of {owner} on {handle.device} from "
                f"{device_identity(index)}: {error}. This process sees "
                f"{', '.join(visible_devices())}. Let it see both GPUs (CUDA_VISIBLE_DEVICES), and "
                "run containers with --ipc=host and one pid namespace; otherwise use the broadcast "
                "or reshard transport."
            ) from error
        if handle.nbytes > room:
            raise EnvironmentUnsupportedError(
                f"{owner} promised {handle.nbytes} bytes but its allocation has only "
                f"{room}; export again"
            )
        return RawBuffer(address, handle.nbytes, index)

    @property
    def opened(self) -> int:
        """Mappings made so far and still open."""
        handles = self._handles
        return len(self._maps) + (handles.opened - handles.closed if handles is not None else 0)

    def close(self) -> None:
        """Drops every mapping; safe twice."""
        self._maps.clear()
        if self._handles is not None:
            self._handles.close()
            self._handles = None


def _require_peer_access(index: int, owner_device: str, owner: str) -> None:
    """Refuses GPUs that cannot read each other; one that cannot be seen here is found by trying.

    Raises:
        EnvironmentUnsupportedError: Naming both GPUs.
    """
    seen = visible_devices()
    if owner_device not in seen or seen.index(owner_device) == index:
        return
    if not torch.cuda.can_device_access_peer(index, seen.index(owner_device)):
        raise EnvironmentUnsupportedError(
            f"{device_identity(index)} has no peer access to {owner_device} of {owner}, so the ipc "
            "transport cannot read it. Put trainer and engine on GPUs that `python -m weight_sync "
            "doctor` shows as peers, or use the broadcast or reshard transport."
        )


def _readonly(view: mmap.mmap) -> torch.Tensor:
    import warnings

    with warnings.catch_warnings():
        # torch warns that the buffer is not writable; nothing here ever writes to it.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(view, dtype=torch.uint8)
