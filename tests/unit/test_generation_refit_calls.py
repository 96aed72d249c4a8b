"""What the facade says about arguments of the older interface that it has no use for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from ray.actor import ActorHandle

from generation.answers import Answer
from generation.errors import FleetStateError
from generation.limits import Limits
from generation.refit_calls import RefitCalls
from generation.refit_driver import RefitDriver
from generation.roster import Roster
from weight_sync.membership import Membership

MEMBERSHIP = Membership(1, 1, (0, 1), 1)


class Pool:
    """Two shards that nobody calls: there are no trainers yet."""

    shards = (0, 1)
    shard_width = 1
    is_empty = False

    def leader(self, shard: int) -> ActorHandle:
        raise AssertionError("nobody is called")

    def ask(
        self, shards: Iterable[int], method: str, *args: object, timeout_s: float
    ) -> dict[int, Answer[Any]]:
        raise AssertionError("nobody is asked")


@pytest.fixture
def calls() -> RefitCalls:
    """Returns the refit calls of a fleet without trainers, so that each ends in an error."""
    calls = RefitCalls()
    calls.pool = Pool()  # type: ignore[assignment]
    calls.roster = Roster(Pool.shards)
    calls.refits = RefitDriver(Pool(), calls.roster, Limits())
    return calls


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.init_collective("10.0.0.1", 29500, 3, train_world_size=1),
        lambda c: c.rebuild_collective(MEMBERSHIP, "10.0.0.1", 29500),
        lambda c: c.init_nccl_reshard_comm_group(["10.0.0.1"], [29500], 1, 1, 3),
        lambda c: c.rebuild_nccl_reshard_comm_group(MEMBERSHIP, ["10.0.0.1"], [29500], 1, 1, 3),
    ],
)
def test_an_address_for_groups_is_said_once_not_to_be_used(
    calls: RefitCalls, caplog: pytest.LogCaptureFixture, call: Callable[[RefitCalls], object]
) -> None:
    for _ in range(2):
        with pytest.raises(FleetStateError, match="no trainers"):
            call(calls)
    (said,) = warnings(caplog)
    assert "10.0.0.1" in said
    assert "29500" in said
    assert "not used" in said


def test_no_address_for_groups_is_no_reason_to_warn(
    calls: RefitCalls, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(FleetStateError, match="no trainers"):
        calls.init_nccl_reshard_comm_group([], [], 1, 1, 3)
    with pytest.raises(FleetStateError, match="no trainers"):
        calls.init_collective("", 0, 3, train_world_size=1)
    assert warnings(caplog) == []
