"""The doctor finds what forbids refits on this very machine, says the way out, and never raises."""

from __future__ import annotations

import io
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from weight_sync import environment
from weight_sync.doctor import report
from weight_sync.environment import Finding, ask_peer
from weight_sync.trainer.export import share_storage

pytestmark = pytest.mark.timeout(120)


def levels(found: Sequence[Finding]) -> dict[str, str]:
    return {finding.name: finding.level for finding in found}


def test_the_command_names_every_check_and_succeeds_here() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weight_sync", "doctor"], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("      ->")]
    assert {line.split()[0] for line in lines} <= {"ok", "warn"}
    named = {line[6:].split(":")[0] for line in lines}
    assert {"torch", "host", "descriptors", "sockets", "CURVE", "NCCL settings"} <= named
    assert any("another process maps CPU weights: exact" in line for line in lines)
    if not torch.cuda.is_available():
        assert "no CUDA device" in done.stdout


def test_one_failure_is_the_exit_code_and_comes_with_its_way_out() -> None:
    out = io.StringIO()
    found = [Finding("a", "ok", "fine"), Finding("b", "fail", "broken", "mend it")]
    assert report(iter(found), out) == 1
    assert out.getvalue().splitlines() == ["ok    a: fine", "fail  b: broken", "      -> mend it"]


def test_warnings_do_not_fail() -> None:
    assert report(iter([Finding("a", "warn", "slow", "hurry")]), io.StringIO()) == 0


def test_a_socket_directory_that_cannot_be_used_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WEIGHT_SYNC_SOCKET_DIR", str(tmp_path / "missing"))
    assert levels(environment.sockets())["sockets"] == "fail"
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setenv("WEIGHT_SYNC_SOCKET_DIR", str(deep))
    assert levels(environment.sockets())["sockets"] == "fail"
    assert not list(deep.iterdir())


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_named_with_their_variable(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    (warning,) = [f for f in environment.settings() if f.level == "warn"]
    assert name in warning.remedy
    monkeypatch.setenv(name, "expandable_segments:False")
    assert levels(environment.settings()) == {"NCCL settings": "ok"}


def test_few_descriptors_are_a_warning() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512));"
        "from weight_sync.environment import limits; print([f.level for f in limits()][0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "warn", done.stderr
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] != 512


def test_memory_that_another_process_cannot_or_should_not_read_fails() -> None:
    device = torch.device("cpu")
    memory, right = share_storage(512, device)
    memory.copy_(torch.arange(512).to(torch.uint8))
    other, wrong = share_storage(512, device)
    other.zero_()
    closed = os.open(os.devnull, os.O_RDONLY)
    os.close(closed)
    gone = type(right)("shm", 512, pid=os.getpid(), descriptor=closed, inode=1)
    found = ask_peer("peer", [right, wrong, gone], "cpu")
    assert [f.level for f in found] == ["ok", "fail", "fail"]
    assert "other bytes" in found[1].text
    assert "same user" in found[2].text
    assert "--ipc=host" in found[2].remedy
