"""Calls without a deadline are given up on in time; launches and aborts do not collide."""

from __future__ import annotations

import threading
import time

import pytest

from weight_sync.comm.bounded import BoundedCall
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.nccl_launch import LaunchGate, nccl_library
from weight_sync.errors import EnvironmentUnsupportedError


def nothing() -> None:
    pass


def test_a_call_in_time_gives_its_result() -> None:
    call = BoundedCall(lambda: 7, lambda late: None, "call")
    assert call.wait(Deadline(5), nothing)
    assert call.result == 7


def test_an_error_of_the_call_is_raised_by_the_wait() -> None:
    call: BoundedCall[None] = BoundedCall(lambda: int("x") and None, lambda late: None, "call")
    with pytest.raises(ValueError, match="invalid literal"):
        call.wait(Deadline(5), nothing)


def test_a_call_that_does_not_return_is_given_up_and_its_result_discarded() -> None:
    release, discarded = threading.Event(), threading.Event()
    results: list[int] = []

    def discard(late: int) -> None:
        results.append(late)
        discarded.set()

    def call() -> int:
        release.wait(10)
        return 7

    bounded = BoundedCall(call, discard, "call")
    begin = time.monotonic()
    assert not bounded.wait(Deadline(0.2), nothing)
    assert time.monotonic() - begin < 2
    release.set()
    assert discarded.wait(5)
    assert results == [7]


def test_what_the_look_raises_ends_the_wait() -> None:
    release = threading.Event()
    bounded = BoundedCall(lambda: release.wait(10), lambda late: None, "call")

    def look() -> None:
        raise LookupError("a peer died")

    with pytest.raises(LookupError, match="a peer died"):
        bounded.wait(Deadline(9), look)
    release.set()


def test_a_closed_gate_lets_no_launch_in() -> None:
    gate = LaunchGate()
    gate.close()
    assert not gate.enter()


def test_a_closing_gate_waits_for_the_launch_inside() -> None:
    gate = LaunchGate()
    assert gate.enter()
    left: list[float] = []

    def leave() -> None:
        left.append(time.monotonic())
        gate.leave()

    timer = threading.Timer(0.05, leave)
    timer.start()
    gate.close()
    assert time.monotonic() >= left[0]
    timer.join()


def test_a_closing_gate_does_not_wait_for_a_launch_that_is_stuck() -> None:
    gate = LaunchGate()
    assert gate.enter()
    begin = time.monotonic()
    gate.close()
    assert time.monotonic() - begin < 2


def test_a_machine_without_cupy_is_told_what_to_install() -> None:
    try:
        import cupy  # noqa: F401
    except ImportError:
        with pytest.raises(EnvironmentUnsupportedError, match="cuda12 or cuda13 extra"):
            nccl_library()
    else:
        assert nccl_library().get_version() > 0
