"""Private socket directories of processes that were killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weight_sync.wire.address import PrivateDirectory

OWNER = """
import sys
from weight_sync.wire.address import PrivateDirectory
made = PrivateDirectory()
print(made.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def root(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where all socket directories of this test are."""
    monkeypatch.setenv("WEIGHT_SYNC_SOCKET_DIR", str(short_path))
    return short_path


def owner() -> tuple[subprocess.Popen[str], Path]:
    """A process with a directory of its own, and that directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=30)


def test_the_directory_of_a_killed_process_is_removed_by_the_next(root: Path) -> None:
    process, left = owner()
    end(process)
    assert left.exists()
    made = PrivateDirectory()
    assert not left.exists()
    assert os.listdir(root) == [Path(made.path).name]
    made.close()


def test_the_directory_of_a_living_process_stays(root: Path) -> None:
    process, held = owner()
    made = PrivateDirectory()
    assert held.exists()
    made.close()
    end(process)


def test_what_is_not_a_socket_directory_stays(root: Path) -> None:
    other = root / "ws-other"
    other.mkdir()
    PrivateDirectory().close()
    assert other.exists()


def test_nobody_else_can_enter(root: Path) -> None:
    made = PrivateDirectory()
    assert Path(made.path).stat().st_mode & 0o777 == 0o700
    made.close()
