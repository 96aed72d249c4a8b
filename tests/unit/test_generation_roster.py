"""Who serves, who takes part in refits, who is next."""

from __future__ import annotations

import pytest

from generation.errors import NoHealthyShardsError
from generation.fleet import GenerationFleetHealth, ShardState
from generation.roster import Roster
from generation.selector import HealthyShardSelector
from weight_sync.membership import Membership


def test_shards_take_turns_and_dead_ones_are_skipped():
    roster = Roster([0, 1, 2])
    assert [roster.take() for _ in range(4)] == [0, 1, 2, 0]
    roster.died(1, "gone")
    assert {roster.take() for _ in range(4)} == {0, 2}
    assert roster.alive() == roster.participants() == [0, 2]


def test_a_replacement_takes_part_in_refits_and_serves_after_one():
    roster = Roster([0, 1])
    roster.died(1, "gone")
    roster.restarted(1)
    assert roster.participants() == [0, 1]
    assert roster.serving() == [0]
    roster.refitted(1, 4)
    assert roster.serving() == [0, 1]


def test_a_torn_shard_serves_again_after_a_whole_refit():
    roster = Roster([0, 1])
    roster.torn(0)
    assert roster.serving() == [1]
    assert roster.participants() == [0, 1]
    roster.refitted(0, 2)
    assert roster.serving() == [0, 1]


def test_a_membership_limits_participants_to_its_living_shards():
    roster = Roster([0, 1, 2])
    roster.set_membership(Membership(1, 1, (1, 2), 1))
    roster.died(2, "gone")
    assert roster.participants() == [1]
    assert roster.serving() == [0, 1]


def test_nobody_left_is_an_error_that_says_what_to_do():
    roster = Roster([0])
    roster.died(0, "gone")
    with pytest.raises(NoHealthyShardsError, match="restart one"):
        roster.take()


def test_an_attached_monitor_is_told_and_asked():
    roster = Roster([0, 1])
    monitor = GenerationFleetHealth(2)
    selector = HealthyShardSelector(monitor)
    roster.attach(monitor, selector)
    roster.torn(0)
    assert monitor.state_of(0) is ShardState.STALE
    assert roster.serving() == [1]
    roster.refitted(0, 7)
    assert monitor.snapshot()[0].weight_version == 7
    roster.failed(1, RuntimeError("x"))
    assert monitor.snapshot()[1].reported_failures == 1
    roster.succeeded(1)
    assert monitor.snapshot()[1].reported_failures == 0
    roster.died(1, "gone")
    assert monitor.state_of(1) is ShardState.DEAD
    assert roster.take() == 0
    assert selector.outstanding(0) == 1
    roster.give_back(0)
    assert selector.outstanding(0) == 0


def attached(roster: Roster) -> GenerationFleetHealth:
    """Attaches a new monitor and selector."""
    monitor = GenerationFleetHealth(len(roster.shards), base_urls=["u0", "u1"])
    roster.attach(monitor, HealthyShardSelector(monitor))
    return monitor


def test_a_monitor_is_told_of_a_death_before_it_was_attached():
    roster = Roster([0, 1])
    roster.died(0, "gone")
    assert attached(roster).state_of(0) is ShardState.DEAD


@pytest.mark.parametrize("event", ["torn", "restarted"])
def test_a_monitor_is_told_of_stale_weights_before_it_was_attached(event: str):
    roster = Roster([0, 1])
    getattr(roster, event)(0)
    monitor = attached(roster)
    assert monitor.state_of(0) is ShardState.STALE
    assert monitor.serving_base_urls() == ["u1"]


def test_a_shard_that_was_stale_before_the_monitor_came_serves_after_a_refit():
    roster = Roster([0, 1])
    roster.torn(0)
    monitor = attached(roster)
    roster.refitted(0, 1)
    assert monitor.state_of(0) is ShardState.HEALTHY
    assert roster.serving() == [0, 1]


def test_a_selector_is_not_followed_to_a_shard_that_the_roster_knows_to_be_stale():
    roster = Roster([0, 1])
    monitor = attached(roster)
    roster.torn(0)
    monitor.report_refit(0, weight_version=1)  # by somebody else, of what the roster saw torn
    assert roster.take() == 1
    assert roster.take() == 1


def test_a_selector_with_no_shard_that_serves_is_an_error():
    roster = Roster([0, 1])
    monitor = attached(roster)
    roster.torn(0)
    roster.torn(1)
    monitor.report_refit(0, weight_version=1)
    with pytest.raises(NoHealthyShardsError, match="no shard can be handed a request"):
        roster.take()
