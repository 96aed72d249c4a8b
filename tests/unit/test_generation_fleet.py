"""Health of the fleet: every transition, the ones that must not exist, and the selector."""

from __future__ import annotations

import dataclasses

import pytest

from generation.errors import (
    GenerationConfigError,
    GenerationFleetExhausted,
    NoHealthyShardsError,
)
from generation.fleet import FleetHealthPolicy, GenerationFleetHealth, ShardState
from generation.selector import HealthyShardSelector
from weight_sync.errors import EngineStateError, GenerationUnavailableError

POLICY = FleetHealthPolicy(
    unhealthy_threshold=3, healthy_threshold=2, max_restart_attempts_per_shard=2
)


def fleet(shards: int = 2) -> GenerationFleetHealth:
    """Returns a healthy fleet with addresses u0, u1, ..."""
    return GenerationFleetHealth(shards, POLICY, [f"u{i}" for i in range(shards)])


def in_state(state: ShardState) -> GenerationFleetHealth:
    """Returns a fleet whose shard 0 got into this state by allowed transitions."""
    health = fleet()
    if state is ShardState.SUSPECT:
        health.record_probe(0, ok=False)
    elif state is ShardState.STALE:
        health.mark_weights_partial(0)
    elif state in (ShardState.DEAD, ShardState.RESTARTING):
        health.record_actor_death(0)
        if state is ShardState.RESTARTING:
            assert health.mark_restarting(0)
    elif state is ShardState.RETIRED:
        health.retire(0, "gone")
    assert health.state_of(0) is state
    return health


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(FleetHealthPolicy)])
def test_threshold_below_one_is_refused(name: str) -> None:
    with pytest.raises(GenerationConfigError, match=f"{name} must be at least 1"):
        FleetHealthPolicy(**{name: 0})


@pytest.mark.parametrize(("count", "urls"), [(0, None), (2, ["u0"])])
def test_fleet_without_shards_or_with_other_addresses_is_refused(
    count: int, urls: list[str | None] | None
) -> None:
    with pytest.raises(GenerationConfigError, match="base_urls"):
        GenerationFleetHealth(count, POLICY, urls)


@pytest.mark.parametrize(
    ("state", "serves", "absent"),
    [
        (ShardState.HEALTHY, True, False),
        (ShardState.SUSPECT, True, False),
        (ShardState.STALE, False, False),
        (ShardState.DEAD, False, True),
        (ShardState.RESTARTING, False, True),
        (ShardState.RETIRED, False, True),
    ],
)
def test_state_decides_service_and_refit(state: ShardState, serves: bool, absent: bool) -> None:
    health = in_state(state)
    assert (0 in health.serving_shards()) is serves
    assert (0 in health.absent_shards()) is absent
    assert ("u0" in health.serving_base_urls()) is serves


def test_one_failed_probe_is_only_suspicious() -> None:
    health = fleet()
    health.record_probe(0, ok=False, error="timeout")
    assert health.state_of(0) is ShardState.SUSPECT
    assert health.snapshot()[0].last_error == "timeout"


def test_failed_probes_in_a_row_kill_a_shard() -> None:
    health = fleet()
    for _ in range(3):
        health.record_probe(0, ok=False)
    assert health.state_of(0) is ShardState.DEAD


def test_good_probe_ends_the_streak_of_failed_ones() -> None:
    health = fleet()
    for ok in (False, False, True, False, False):
        health.record_probe(0, ok=ok)
    assert health.state_of(0) is ShardState.SUSPECT


def test_suspicion_clears_after_good_probes_in_a_row() -> None:
    health = in_state(ShardState.SUSPECT)
    health.record_probe(0, ok=True)
    assert health.state_of(0) is ShardState.SUSPECT
    health.record_probe(0, ok=True)
    assert health.state_of(0) is ShardState.HEALTHY


def test_good_probes_do_not_forgive_failed_requests() -> None:
    health = fleet()
    for _ in range(3):
        health.report_failure(0, RuntimeError("no output"))
        for _ in range(5):
            health.record_probe(0, ok=True)
    assert health.state_of(0) is ShardState.DEAD
    assert health.snapshot()[0].last_error == "RuntimeError: no output"


def test_shard_with_failed_requests_stays_suspect_however_well_it_probes() -> None:
    health = fleet()
    health.report_failure(0, "no output")
    for _ in range(5):
        health.record_probe(0, ok=True)
    assert health.state_of(0) is ShardState.SUSPECT


def test_successful_request_ends_the_streak_of_failed_ones() -> None:
    health = fleet()
    for _ in range(2):
        health.report_failure(0, "a")
        health.report_failure(0, "b")
        health.report_success(0)
    assert health.state_of(0) is ShardState.SUSPECT


def test_actor_death_is_conclusive_at_once() -> None:
    health = fleet()
    health.record_actor_death(0)
    assert health.state_of(0) is ShardState.DEAD


@pytest.mark.parametrize("state", [ShardState.RESTARTING, ShardState.RETIRED])
def test_late_news_of_the_old_actor_changes_nothing(state: ShardState) -> None:
    health = in_state(state)
    health.record_actor_death(0)
    assert health.state_of(0) is state


@pytest.mark.parametrize(
    "state", [ShardState.DEAD, ShardState.RESTARTING, ShardState.STALE, ShardState.RETIRED]
)
def test_good_probes_never_bring_a_shard_back(state: ShardState) -> None:
    health = in_state(state)
    for _ in range(10):
        health.record_probe(0, ok=True)
        health.report_success(0)
    assert health.state_of(0) is state


@pytest.mark.parametrize("state", [ShardState.DEAD, ShardState.RESTARTING, ShardState.RETIRED])
def test_refit_never_brings_an_absent_shard_back(state: ShardState) -> None:
    health = in_state(state)
    assert health.report_refit(0, weight_version=3) is False
    assert health.state_of(0) is state
    assert health.snapshot()[0].weight_version == 0


def test_stale_shard_that_stops_answering_dies() -> None:
    health = in_state(ShardState.STALE)
    for _ in range(3):
        health.record_probe(0, ok=False)
    assert health.state_of(0) is ShardState.DEAD


@pytest.mark.parametrize("state", [ShardState.DEAD, ShardState.RESTARTING, ShardState.RETIRED])
def test_failed_refit_does_not_launder_an_absent_shard_into_stale(state: ShardState) -> None:
    health = in_state(state)
    health.mark_weights_partial(0)
    assert health.state_of(0) is state


def test_refit_brings_a_stale_shard_into_service_at_its_version() -> None:
    health = in_state(ShardState.STALE)
    assert health.report_refit(0, weight_version=7) is True
    assert health.state_of(0) is ShardState.HEALTHY
    assert health.snapshot()[0].weight_version == 7


def test_suspect_shard_is_still_suspect_after_a_failed_and_a_good_refit() -> None:
    health = in_state(ShardState.SUSPECT)
    health.mark_weights_partial(0)
    health.report_refit(0, weight_version=1)
    assert health.state_of(0) is ShardState.SUSPECT


def test_refit_of_a_suspect_shard_does_not_promote_it() -> None:
    health = in_state(ShardState.SUSPECT)
    health.report_refit(0, weight_version=1)
    assert health.state_of(0) is ShardState.SUSPECT


def test_refit_keeps_a_survivors_failed_requests() -> None:
    health = fleet()
    health.report_failure(0, "a")
    health.mark_weights_partial(0)
    health.report_refit(0, weight_version=1)
    assert health.snapshot()[0].reported_failures == 1


def test_weight_version_never_goes_back() -> None:
    health = fleet()
    health.report_refit(0, weight_version=57)
    with pytest.raises(EngineStateError, match="version 1 would go back"):
        health.report_refit(0, weight_version=1)


def test_restart_leads_through_stale_at_the_new_address() -> None:
    health = in_state(ShardState.RESTARTING)
    health.mark_loaded(0, "u0-new")
    assert health.state_of(0) is ShardState.STALE
    assert health.shard_for_base_url("u0-new") == 0
    assert health.shard_for_base_url("u0") is None


def test_restart_forgets_what_the_old_engine_failed_at() -> None:
    health = fleet()
    for _ in range(3):
        health.report_failure(0, "a")
    health.mark_restarting(0)
    health.mark_loaded(0)
    assert health.snapshot()[0].reported_failures == 0


def test_failed_restart_leaves_the_shard_dead() -> None:
    health = in_state(ShardState.RESTARTING)
    health.mark_restart_failed(0, "no device")
    assert health.state_of(0) is ShardState.DEAD


@pytest.mark.parametrize("state", [ShardState.HEALTHY, ShardState.STALE, ShardState.RETIRED])
def test_only_a_dead_shard_is_restarted(state: ShardState) -> None:
    health = in_state(state)
    assert health.mark_restarting(0) is False
    assert health.state_of(0) is state


def test_restarts_are_capped_by_retirement() -> None:
    health = in_state(ShardState.DEAD)
    for _ in range(POLICY.max_restart_attempts_per_shard):
        assert health.mark_restarting(0)
        health.mark_restart_failed(0, "no device")
    assert health.mark_restarting(0) is False
    assert health.state_of(0) is ShardState.RETIRED
    assert "2 restarts used up, last error: no device" in health.snapshot()[0].last_error


def test_good_refits_do_not_refill_the_restarts() -> None:
    health = fleet()
    for version in range(1, POLICY.max_restart_attempts_per_shard + 1):
        health.record_actor_death(0)
        assert health.mark_restarting(0)
        health.mark_loaded(0)
        health.report_refit(0, weight_version=version)
    health.record_actor_death(0)
    assert health.mark_restarting(0) is False


def test_late_restart_does_not_revive_a_retired_shard() -> None:
    health = in_state(ShardState.RESTARTING)
    health.retire(0, "overdue")
    health.mark_loaded(0, "u0-new")
    assert health.state_of(0) is ShardState.RETIRED


def test_epoch_grows_exactly_when_the_serving_set_changes() -> None:
    health = fleet()
    epochs = []
    steps = (
        lambda: health.record_probe(0, ok=False),  # suspect, still serving
        lambda: health.mark_weights_partial(0),  # out
        lambda: health.record_actor_death(0),  # still out
        lambda: health.mark_restarting(0),
        lambda: health.mark_loaded(0),
        lambda: health.report_refit(0, weight_version=1),  # in
        lambda: health.report_refit(0, weight_version=2),
    )
    for step in steps:
        step()
        epochs.append(health.membership_epoch)
    assert epochs == [0, 1, 1, 1, 1, 2, 2]


def test_exhausted_fleet_is_reported_with_every_shard() -> None:
    health = fleet()
    health.raise_if_exhausted()
    health.record_actor_death(0, "node lost")
    health.mark_weights_partial(1)
    with pytest.raises(GenerationFleetExhausted, match=r"0: dead node lost, 1: stale"):
        health.raise_if_exhausted()


def test_metrics_show_states_versions_and_restarts() -> None:
    health = in_state(ShardState.RESTARTING)
    health.report_refit(1, weight_version=4)
    metrics = health.as_metrics()
    assert metrics["fleet/shards/restarting"] == 1.0
    assert metrics["fleet/shards/healthy"] == 1.0
    assert metrics["fleet/weight_version/1"] == 4.0
    assert metrics["fleet/restart_attempts/0"] == 1.0
    assert metrics["fleet/membership_epoch"] == 1.0


def test_selector_takes_the_least_busy_shard_lowest_index_first() -> None:
    selector = HealthyShardSelector(fleet(3))
    assert [selector.acquire() for _ in range(4)] == [0, 1, 2, 0]
    selector.release(1)
    assert selector.acquire() == 1


def test_selector_skips_shards_that_do_not_serve() -> None:
    selector = HealthyShardSelector(in_state(ShardState.STALE))
    assert [selector.acquire() for _ in range(3)] == [1, 1, 1]


def test_selector_chooses_among_the_shards_it_is_given() -> None:
    selector = HealthyShardSelector(fleet(3))
    assert [selector.acquire([1, 2]) for _ in range(3)] == [1, 2, 1]


def test_selector_without_serving_shards_says_why() -> None:
    health = in_state(ShardState.DEAD)
    health.mark_weights_partial(1)
    with pytest.raises(NoHealthyShardsError, match="0: 'dead', 1: 'stale'") as caught:
        HealthyShardSelector(health).acquire()
    assert isinstance(caught.value, GenerationUnavailableError)


def test_selector_counts_never_fall_below_zero() -> None:
    selector = HealthyShardSelector(fleet())
    selector.release(0)
    selector.acquire()
    assert selector.outstanding(0) == 1
