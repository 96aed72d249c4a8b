"""What counts as left behind: threads of calls that are stuck, not those kept for the next call."""

from __future__ import annotations

import threading

import pytest

from bench.fault_census import census
from weight_sync.comm.deadline import Deadline
from weight_sync.fanout import run_all

pytestmark = pytest.mark.timeout(20)


def test_threads_of_calls_that_returned_are_not_left_behind() -> None:
    before = census()
    _, errors = run_all({"a": 1, "b": 2}, lambda n: n, Deadline(10), "pause")
    assert not errors
    pause = threading.Event()
    while census().beyond(before):  # Until threads are idle, which is a moment later.
        pause.wait(0.01)


def test_the_thread_of_a_call_that_is_stuck_is_named() -> None:
    free = threading.Event()
    before = census()
    run_all({"shard 3": 20}, free.wait, Deadline(0.1), "resume")
    assert census().beyond(before) == ["thread weight-sync-resume-shard 3"]
    free.set()
