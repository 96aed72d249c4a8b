"""Which machine, and which accelerator, a process is on."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def host_identity() -> str:
    """Equal for processes that can open each other's descriptors: host, boot and pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        boot, namespace = "", ""
    return f"{socket.gethostname()}/{boot}/{namespace}"


def device_identity(index: int | None) -> str:
    """UUID of a CUDA device as ``GPU-...``, or ``"cpu"`` for None."""
    if index is None:
        return "cpu"
    import torch

    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"


def visible_devices() -> tuple[str, ...]:
    """UUIDs of the CUDA devices this process sees, by index."""
    import torch

    return tuple(
        f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(torch.cuda.device_count())
    )
