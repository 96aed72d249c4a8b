"""A deadline is finite, shared by nested waits, and names what it ended."""

from __future__ import annotations

import math

import pytest

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import ConfigError, DeadlineError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan])
def test_an_endless_or_negative_deadline_is_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="finite"):
        Deadline(seconds)


def test_remaining_counts_down_to_zero_and_stays_there() -> None:
    clock = Clock()
    deadline = Deadline(3.0, clock)
    clock.now += 2.0
    assert (deadline.remaining(), deadline.expired) == (1.0, False)
    clock.now += 5.0
    assert (deadline.remaining(), deadline.expired) == (0.0, True)


def test_a_native_timeout_is_never_zero_because_that_means_no_limit() -> None:
    assert Deadline(0.0).native().total_seconds() > 0


@pytest.mark.parametrize(("seconds", "expected"), [(1.0, 1.0), (9.0, 3.0)])
def test_sooner_never_extends(seconds: float, expected: float) -> None:
    assert Deadline(3.0, Clock()).sooner(seconds).remaining() == expected


def test_check_names_stage_version_epoch_and_ranks() -> None:
    clock = Clock()
    deadline = Deadline(3.0, clock)
    deadline.check("transfer")
    clock.now += 3.0
    with pytest.raises(DeadlineError) as raised:
        deadline.check("transfer", version=4, epoch=2, ranks=["trainer 1"])
    error = raised.value
    assert (error.stage, error.version, error.epoch, error.ranks) == (
        "transfer",
        4,
        2,
        ("trainer 1",),
    )
