"""Looks at a shard's machine from outside the shard: its processes, and the memory of its GPUs.

An engine runs in processes of its own. When the actor in front of them is killed they can live on,
hold the devices and make the replacement run out of memory. Every process of a shard inherits one
random mark in its environment, by which exactly those processes are found and ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

logger = logging.getLogger(__name__)

MARK = "WEIGHT_SYNC_SHARD_MARK"


@dataclasses.dataclass(frozen=True)
class NodeState:
    """What a machine says about one shard.

    Attributes:
        processes: Process id to command of every live process with the shard's mark.
        gpus: One line per GPU: index, used and total MiB.
        gpu_processes: One line per process on a GPU: GPU, process id, MiB.
    """

    processes: dict[int, str]
    gpus: tuple[str, ...]
    gpu_processes: tuple[str, ...]


def marked_processes(mark: str) -> dict[int, str]:
    """Returns the live processes of this user whose environment carries ``mark``."""
    needle = f"{MARK}={mark}".encode()
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if needle in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                found[int(entry.name)] = command[:120]
    return found


def look(mark: str, timeout_s: float) -> NodeState:
    """Reads the processes of a shard and all GPUs of this machine; never raises."""
    return NodeState(
        marked_processes(mark),
        _ask_tool("--query-gpu=index,memory.used,memory.total", timeout_s),
        _ask_tool("--query-compute-apps=gpu_uuid,pid,used_memory", timeout_s),
    )


def end_marked(mark: str, timeout_s: float) -> dict[int, str]:
    """Ends every process with the mark and waits until they, and what they held, are gone.

    Returns:
        The processes that still live; empty when the shard left nothing behind.
    """
    deadline = time.monotonic() + timeout_s
    ended: dict[int, str] = {}
    while True:
        marked = marked_processes(mark)
        for pid in marked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        ended |= marked
        alive = marked | {pid: name for pid, name in ended.items() if not _released(pid)}
        if not alive or time.monotonic() > deadline:
            return alive
        time.sleep(0.05)


def _released(pid: int) -> bool:
    """Whether a killed process gave back its devices: its last thread has ended.

    Its environment is gone earlier, with its first thread, while the driver still takes back the
    memory that a replacement would need.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in ("Z", "X") and len(threads) <= 1


def _ask_tool(query: str, timeout_s: float) -> tuple[str, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        done = subprocess.run(
            [tool, query, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return (f"{query} failed: {error}",)
    return tuple(done.stdout.splitlines())
