"""Processes found by their mark and ended for good."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from generation.node_probe import MARK, _released, end_marked, marked_processes

# Its first thread ends at once, another one lives on.
HEADLESS = (
    "import ctypes, threading, time\n"
    "threading.Thread(target=time.sleep, args=(60,)).start()\n"
    "ctypes.CDLL(None).pthread_exit(None)\n"
)


def start(code: str, mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, MARK: mark})


def wait_until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_marked_process_is_ended_also_when_nobody_waits_for_it():
    process = start("import time; time.sleep(60)", "probe-1")
    wait_until(lambda: marked_processes("probe-1"))
    assert list(marked_processes("probe-1")) == [process.pid]
    assert end_marked("probe-1", 10) == {}
    assert state(process.pid) == "Z"
    assert process.wait(10) == -9


def test_a_process_holds_its_devices_until_its_last_thread_ended():
    process = start(HEADLESS, "probe-2")
    wait_until(lambda: state(process.pid) == "Z")
    assert not marked_processes("probe-2")
    assert not _released(process.pid)
    process.kill()
    wait_until(lambda: _released(process.pid))
    assert process.wait(10) == -9
    assert _released(process.pid)
