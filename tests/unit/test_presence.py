"""Exclusion by the caller and loss in a refit are two things."""

from __future__ import annotations

from weight_sync.presence import Presence


def test_lost_shards_are_found_again_but_excluded_ones_stay_out() -> None:
    presence = Presence()
    presence.exclude([1])
    presence.lose([0])
    assert presence.absent == {0, 1}
    presence.find_lost()
    assert presence.absent == {1}


def test_saying_anew_who_is_excluded_takes_the_lost_in() -> None:
    presence = Presence()
    presence.lose([0])
    presence.exclude([])
    assert presence.absent == frozenset()


def test_a_replaced_shard_takes_part_whatever_it_was() -> None:
    presence = Presence()
    presence.exclude([0])
    presence.lose([1])
    presence.restore(0)
    presence.restore(1)
    assert presence.absent == frozenset()
