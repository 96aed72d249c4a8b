"""Builds the CUDA sources at run time and launches their kernels on torch's streams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from weight_sync.errors import EnvironmentUnsupportedError, LayoutError
from weight_sync.kernels.base import RawBuffer

if TYPE_CHECKING:
    import torch

# THREADS of cuda/common.cuh.
_THREADS = 256


@dataclass(frozen=True)
class _Stream:
    """What cupy asks of a stream: its pointer. cupy's own wrapper would warn, or destroy it."""

    ptr: int


@cache
def load(parts: tuple[str, ...], function: str, device: int) -> Any:  # noqa: ANN401
    """Compiles files of ``cuda/`` for a device (cupy caches the binary on disk).

    Args:
        parts: File names, put together in this order.
        function: Kernel in them.
        device: Device ordinal; the binary is for its architecture.

    Returns:
        The kernel, for :func:`launch`.

    Raises:
        EnvironmentUnsupportedError: If cupy is missing or the source does not build here.
    """
    try:
        import cupy
    except ImportError as error:
        raise EnvironmentUnsupportedError(
            "CUDA kernels need cupy; install the wheel of your CUDA version, e.g. cupy-cuda13x"
        ) from error
    folder = files("weight_sync.kernels") / "cuda"
    # One text: cupy's cache key covers the source, but not files it would include.
    text = "\n".join((folder / part).read_text() for part in parts)
    try:
        with cupy.cuda.Device(device):
            return cupy.RawModule(code=text, options=("--std=c++17",)).get_function(function)
    except (cupy.cuda.compiler.CompileException, RuntimeError) as error:
        raise EnvironmentUnsupportedError(
            f"kernel {function} does not build for cuda:{device}: {error}. Compute capability 8.0 "
            "or newer and a cupy of the driver's CUDA version are needed"
        ) from error


def launch(
    kernel: Any,  # noqa: ANN401
    device: int,
    stream: int | None,
    blocks: int,
    addresses: Sequence[int],
) -> None:
    """Enqueues a kernel.

    Args:
        kernel: From :func:`load`, for the same device.
        device: Device ordinal.
        stream: Stream pointer; torch's current stream of the device by default.
        blocks: Grid size; one block per tile.
        addresses: Pointer arguments.
    """
    import torch

    if stream is None:
        stream = torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.device(device):
        arguments = tuple(np.uint64(a) for a in addresses)
        kernel((blocks,), (_THREADS,), arguments, stream=_Stream(stream))


def one_device(buffers: Sequence[torch.Tensor | RawBuffer], what: str) -> int:
    """The device that all buffers are on, or mapped on.

    Raises:
        LayoutError: If there are several.
    """
    found = {_ordinal(b) for b in buffers}
    if len(found) != 1:
        raise LayoutError(
            f"{what} buffers are on {len(found)} devices {sorted(found)}; compile one program per "
            "device"
        )
    return found.pop()


def _ordinal(buffer: torch.Tensor | RawBuffer) -> int:
    if isinstance(buffer, RawBuffer):
        return -1 if buffer.device is None else buffer.device
    return buffer.get_device()


def allow_peers(device: int, buffers: Sequence[torch.Tensor | RawBuffer]) -> None:
    """Lets kernels on ``device`` read tensors that live on other devices of this process.

    Raises:
        LayoutError: If mapped memory was opened on another device, where a kernel would fault.
        EnvironmentUnsupportedError: If the devices cannot reach each other.
    """
    peers = set()
    for buffer in buffers:
        if not isinstance(buffer, RawBuffer):
            peers.add(_ordinal(buffer))
        elif buffer.device != device:
            raise LayoutError(
                f"memory mapped on cuda:{buffer.device} cannot be read by kernels on "
                f"cuda:{device}; open the IPC handle on the receiving device"
            )
    for peer in sorted(peers - {device}):
        _enable_peer(device, peer)


@cache
def _enable_peer(device: int, peer: int) -> None:
    from cupy.cuda import Device, runtime

    if not runtime.deviceCanAccessPeer(device, peer):
        raise EnvironmentUnsupportedError(
            f"cuda:{device} cannot read the memory of cuda:{peer}; use another transport than ipc"
        )
    with Device(device):
        try:
            runtime.deviceEnablePeerAccess(peer)
        except runtime.CUDARuntimeError as error:
            if "AlreadyEnabled" not in str(error):
                raise EnvironmentUnsupportedError(
                    f"peer access from cuda:{device} to cuda:{peer} was refused: {error}. Use "
                    "another transport than ipc"
                ) from error
