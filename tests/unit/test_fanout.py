"""Calls on many participants: every outcome is seen, nobody is waited for longer than allowed."""

from __future__ import annotations

import threading
import time

import pytest

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import (
    AbortedError,
    ConfigError,
    DeadlineError,
    RefitError,
    VerifyError,
    WeightSyncError,
)
from weight_sync.fanout import Fanout, located, raise_first, run_all

pytestmark = pytest.mark.timeout(20)


def test_results_and_errors_are_separated_by_participant() -> None:
    results, errors = run_all({"a": 2, "b": 0}, lambda n: 6 // n, Deadline(10), "pause", 4, 1)
    assert results == {"a": 3}
    assert isinstance(errors["b"], RefitError)
    assert "ZeroDivisionError" in str(errors["b"])
    assert (errors["b"].stage, errors["b"].version, errors["b"].ranks) == ("pause", 4, ("b",))


def test_calls_run_at_the_same_time() -> None:
    both = threading.Barrier(2, timeout=10)
    results, errors = run_all({"a": 1, "b": 2}, lambda n: n + 0 * both.wait(), Deadline(10), "x")
    assert results == {"a": 1, "b": 2}
    assert not errors


def test_calls_go_on_while_nobody_waits_for_them() -> None:
    begun = threading.Event()
    fanout = Fanout({"a": 1}, lambda n: begun.set() or n, Deadline(10), "publish")
    assert begun.wait(10)
    assert fanout.outcome() == ({"a": 1}, {})


def test_an_answer_that_came_in_time_counts_however_late_it_is_looked_at() -> None:
    deadline = Deadline(0.05)
    done = threading.Event()
    fanout = Fanout({"a": 1}, lambda n: done.set() or n, deadline, "publish")
    assert done.wait(10)
    while not deadline.expired:
        time.sleep(0.01)
    assert fanout.outcome() == ({"a": 1}, {})


def test_a_deadline_that_is_ended_early_ends_the_wait() -> None:
    free, deadline = threading.Event(), Deadline(15)
    threading.Timer(0.05, deadline.end).start()
    start = time.monotonic()
    _, errors = run_all({"a": 15}, free.wait, deadline, "publish")
    assert time.monotonic() - start < 5
    assert isinstance(errors["a"], DeadlineError)
    free.set()


def test_one_that_is_stuck_is_named_when_the_deadline_passes() -> None:
    release = threading.Event()
    start = time.monotonic()
    results, errors = run_all(
        {"quick": 0, "stuck": 8}, lambda s: release.wait(s) or s, Deadline(0.3), "pause"
    )
    assert time.monotonic() - start < 5
    assert results == {"quick": 0}
    assert isinstance(errors["stuck"], DeadlineError)
    assert errors["stuck"].ranks == ("stuck",)
    release.set()


def test_errors_of_the_library_keep_their_class() -> None:
    def refuse(name: str) -> None:
        raise ConfigError(f"{name} is no good")

    _, errors = run_all({"a": "a"}, refuse, Deadline(10), "connect")
    assert type(errors["a"]) is ConfigError


def test_the_first_failure_is_told_while_others_go_on() -> None:
    told: list[str] = []
    release = threading.Event()

    def call(name: str) -> str:
        if name == "bad":
            raise ValueError(name)
        assert release.wait(10)
        return name

    def failed(name: str) -> None:
        told.append(name)
        release.set()

    results, errors = run_all(
        {"bad": "bad", "good": "good"}, call, Deadline(10), "x", failed=failed
    )
    assert told == ["bad"]
    assert results == {"good": "good"}
    assert set(errors) == {"bad"}


def test_the_error_that_says_why_comes_before_those_that_only_waited() -> None:
    why = VerifyError("digests differ", stage="verify")
    errors: dict[str, WeightSyncError] = {
        "a": DeadlineError("silence", stage="x"),
        "b": AbortedError("others failed", stage="x"),
        "c": why,
    }
    with pytest.raises(VerifyError) as raised:
        raise_first(errors)
    assert raised.value is why
    notes = "".join(raised.value.__notes__)
    assert notes.index("others failed") < notes.index("silence")


def test_no_errors_raise_nothing() -> None:
    raise_first({})


def test_what_others_saw_stays_with_an_error_that_is_completed() -> None:
    error = RefitError("no", stage="transfer")
    error.add_note("trainer 1 did not arrive")
    assert located(error, 7, 3, ()).__notes__ == ["trainer 1 did not arrive"]
