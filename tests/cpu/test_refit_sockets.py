"""Case B40: sockets of two jobs never meet; a directory that cannot hold them is refused."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness.contract import connecting, plain_model
from tests.harness.local import LocalTrainers
from tests.harness.sources import BoxSource, whole
from weight_sync.errors import ConfigError

pytestmark = pytest.mark.timeout(30)


def endpoints() -> LocalTrainers:
    return LocalTrainers([BoxSource({"t": whole(torch.zeros(4))})])


def paths(trainers: LocalTrainers) -> list[Path]:
    return [Path(info.address.url.removeprefix("ipc://")) for info in trainers.infos]


def test_b40_two_jobs_with_equal_ranks_work_side_by_side() -> None:
    one, two = torch.full((4,), 1.0), torch.full((4,), 2.0)
    models = [plain_model({"t": torch.zeros(4)}) for _ in range(2)]
    with connecting("ipc") as connect:
        first = connect([{"t": one}], [models[0]])
        second = connect([{"t": two}], [models[1]])
        assert paths(first.trainers) != paths(second.trainers)
        first.sync(1)
        second.sync(1)
        first.sync(2)
        assert first.value("t").tolist() == one.tolist()
        assert second.value("t").tolist() == two.tolist()


def test_b40_a_stale_socket_file_does_not_matter(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHT_SYNC_SOCKET_DIR", str(short_path))
    with endpoints() as dead:
        stale = paths(dead)[0].name
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(short_path / stale))
    left.close()
    with connecting("ipc") as connect:
        setup = connect([{"t": torch.ones(4)}], [plain_model({"t": torch.zeros(4)})])
        setup.sync(1)
        assert setup.value("t").tolist() == [1.0] * 4
    assert (short_path / stale).exists()


def test_b40_only_this_user_can_enter_the_directory(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHT_SYNC_SOCKET_DIR", str(short_path))
    with endpoints() as trainers:
        folder = paths(trainers)[0].parent
        assert folder.parent == short_path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("where", ["/proc", "/dev/null", "missing"])
def test_b40_a_directory_that_cannot_be_written_is_an_error_at_set_up(
    where: str, monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    monkeypatch.setenv("WEIGHT_SYNC_SOCKET_DIR", str(short_path / where))
    with pytest.raises(ConfigError, match="WEIGHT_SYNC_SOCKET_DIR"):
        endpoints()


def test_b40_a_path_that_is_too_long_is_an_error_at_set_up_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, short_path: Path
) -> None:
    folder = short_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setenv("WEIGHT_SYNC_SOCKET_DIR", str(folder))
    with pytest.raises(ConfigError, match="107 bytes"):
        endpoints()
    assert list(folder.iterdir()) == []


def test_b40_closing_removes_the_sockets(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHT_SYNC_SOCKET_DIR", str(short_path))
    with endpoints():
        assert list(short_path.iterdir()) != []
    assert list(short_path.iterdir()) == []


def test_b40_a_process_that_ends_without_closing_removes_the_sockets(short_path: Path) -> None:
    script = "from tests.cpu.test_refit_sockets import endpoints; kept = endpoints()"
    env = os.environ | {"WEIGHT_SYNC_SOCKET_DIR": str(short_path)}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, timeout=25)
    assert list(short_path.iterdir()) == []
