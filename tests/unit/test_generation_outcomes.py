"""What the router counted becomes the health of the shards behind it."""

from __future__ import annotations

import pytest

from generation.fleet import GenerationFleetHealth, ShardState
from generation.keeper import report_outcomes
from generation.router_pool import BackendPool, Outcomes

URL = "http://a:1/v1"


@pytest.fixture
def health() -> GenerationFleetHealth:
    """Returns one healthy shard, which three failures in a row kill."""
    return GenerationFleetHealth(1, base_urls=[URL])


def test_failures_with_successes_between_never_kill_a_shard(health: GenerationFleetHealth) -> None:
    pool = BackendPool(health_managed=True)
    for _ in range(5):
        pool.record_failure(URL, unreachable=False)
        report_outcomes(health, pool.drain_outcomes())
        pool.record_success(URL)
        report_outcomes(health, pool.drain_outcomes())
    assert health.state_of(0) is ShardState.SUSPECT


def test_failures_of_several_looks_with_no_success_between_kill_a_shard(
    health: GenerationFleetHealth,
) -> None:
    for _ in range(3):
        report_outcomes(health, {URL: Outcomes(failures=1)})
    assert health.state_of(0) is ShardState.DEAD


def test_failures_after_the_last_success_of_a_look_kill_a_shard(
    health: GenerationFleetHealth,
) -> None:
    report_outcomes(health, {URL: Outcomes(succeeded=True, failures=3)})
    assert health.state_of(0) is ShardState.DEAD


def test_success_of_a_look_ends_the_streak_of_earlier_looks(health: GenerationFleetHealth) -> None:
    report_outcomes(health, {URL: Outcomes(failures=2)})
    report_outcomes(health, {URL: Outcomes(succeeded=True, failures=2)})
    assert health.state_of(0) is ShardState.SUSPECT


def test_outcomes_of_a_replaced_engine_are_nobodys(health: GenerationFleetHealth) -> None:
    report_outcomes(health, {"http://gone:1/v1": Outcomes(failures=3)})
    assert health.state_of(0) is ShardState.HEALTHY
