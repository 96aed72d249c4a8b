"""The progress line: on terminals only, after a second, ended by a newline."""

from __future__ import annotations

import io

import pytest

from weight_sync import progress
from weight_sync.progress import Progress

pytestmark = pytest.mark.timeout(20)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_DELAY_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_TICK_SECONDS", 0.01)
    monkeypatch.delenv("WEIGHT_SYNC_PROGRESS", raising=False)


def wait_for(stream: io.StringIO, text: str) -> None:
    import time

    end = time.monotonic() + 10
    while text not in stream.getvalue():
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.005)


@pytest.mark.usefixtures("quick")
def test_a_terminal_shows_stage_and_share_done() -> None:
    stream = Terminal()
    with Progress("refit v3", ("pause", "transfer"), stream) as shown:
        shown.stage("pause")
        wait_for(stream, "[" + "-" * 20 + "] pause")
        shown.stage("transfer")
        wait_for(stream, "[" + "#" * 10 + "-" * 10 + "] transfer")
    assert stream.getvalue().endswith("\n")


@pytest.mark.usefixtures("quick")
def test_a_file_shows_nothing() -> None:
    stream = io.StringIO()
    with Progress("refit", ("pause",), stream) as shown:
        shown.stage("pause")
        assert shown._thread is None
    assert stream.getvalue() == ""


@pytest.mark.usefixtures("quick")
def test_on_shows_it_in_a_file_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHT_SYNC_PROGRESS", "on")
    stream = io.StringIO()
    with Progress("refit", ("pause",), stream) as shown:
        shown.stage("pause")
        wait_for(stream, "pause")


@pytest.mark.usefixtures("quick")
def test_off_shows_nothing_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHT_SYNC_PROGRESS", "off")
    with Progress("refit", ("pause",), Terminal()) as shown:
        assert shown._thread is None


def test_a_refit_under_a_second_writes_nothing() -> None:
    stream = Terminal()
    with Progress("refit", ("pause",), stream) as shown:
        shown.stage("pause")
    assert stream.getvalue() == ""
