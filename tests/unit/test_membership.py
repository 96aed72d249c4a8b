"""Memberships: dense ranks, leaving and rejoining, and when groups must be rebuilt."""

from __future__ import annotations

import itertools

import pytest

from weight_sync.errors import MembershipError, NoSurvivingShardsError
from weight_sync.membership import Membership, MembershipTracker, plan_membership


def planned(
    dp: int = 4, width: int = 1, absent: tuple[int, ...] = (), trainers: int = 2
) -> Membership:
    return plan_membership(
        epoch=1, trainer_world_size=trainers, dp_size=dp, total_workers=dp * width, absent=absent
    )


def ranks(membership: Membership) -> list[int]:
    return [
        membership.group_rank(shard, worker)
        for shard in membership.shards
        for worker in range(membership.workers_per_shard)
    ]


def test_all_shards_take_part_when_none_is_absent() -> None:
    assert planned().shards == (0, 1, 2, 3)


def test_a_single_shard_is_a_fleet() -> None:
    assert planned(dp=1, width=4).world_size == 6


@pytest.mark.parametrize(("gone", "left"), [(0, (1, 2, 3)), (2, (0, 1, 3)), (3, (0, 1, 2))])
def test_survivors_are_compacted(gone: int, left: tuple[int, ...]) -> None:
    membership = planned(absent=(gone,))
    assert membership.shards == left
    assert [membership.prefix(shard) for shard in left] == [0, 1, 2]


def test_prefixes_are_contiguous_from_zero_for_every_set_of_survivors() -> None:
    for count in range(4):
        for absent in itertools.combinations(range(4), count):
            membership = planned(width=2, absent=absent)
            prefixes = [membership.prefix(shard) for shard in membership.shards]
            assert prefixes == list(range(0, 2 * len(prefixes), 2))


def test_order_and_repeats_of_absent_shards_do_not_matter() -> None:
    assert planned(absent=(2, 0, 2)) == planned(absent=(0, 2))


def test_wide_shards_have_one_rank_per_worker() -> None:
    membership = planned(dp=3, width=4, absent=(1,))
    assert membership.worker_index(2, 3) == 7
    assert membership.world_size == 10


def test_trainers_keep_their_ranks_when_shards_leave() -> None:
    assert ranks(planned(absent=(0, 1)))[0] == ranks(planned())[0] == 2


@pytest.mark.parametrize(
    ("trainers", "dp", "width", "expected"),
    [(2, 2, 2, [2, 3, 4, 5]), (2, 4, 1, [2, 3, 4, 5]), (2, 4, 2, list(range(2, 10)))],
)
def test_group_ranks_are_dense_and_distinct(
    trainers: int, dp: int, width: int, expected: list[int]
) -> None:
    membership = planned(dp=dp, width=width, trainers=trainers)
    assert ranks(membership) == expected
    assert membership.world_size == trainers + dp * width


def test_a_dense_replica_is_placed_by_its_index_not_its_rank() -> None:
    assert planned(dp=4).worker_index(2, 0) == 2


def test_places_invert_worker_indices() -> None:
    membership = planned(dp=4, width=3, absent=(1,))
    for index in range(membership.workers):
        assert membership.worker_index(*membership.place(index)) == index


def test_a_worker_is_described_by_its_shard_not_its_compacted_index() -> None:
    assert planned(dp=3, width=2, absent=(0,)).describe(2) == "shard 2 worker 0"


def test_losing_every_shard_is_refused() -> None:
    with pytest.raises(NoSurvivingShardsError, match="all 4 engine shards are absent"):
        planned(absent=(0, 1, 2, 3))


def test_an_uneven_fleet_is_refused() -> None:
    with pytest.raises(MembershipError, match="5 workers do not divide over 2 shards"):
        plan_membership(epoch=1, trainer_world_size=1, dp_size=2, total_workers=5)


@pytest.mark.parametrize("absent", [(4,), (-1,)])
def test_a_shard_that_does_not_exist_is_refused(absent: tuple[int, ...]) -> None:
    with pytest.raises(MembershipError, match="do not exist"):
        planned(absent=absent)


@pytest.mark.parametrize("dp", [0, -1])
def test_a_fleet_without_shards_is_refused(dp: int) -> None:
    with pytest.raises(MembershipError, match="dp_size must be at least 1"):
        plan_membership(epoch=1, trainer_world_size=1, dp_size=dp, total_workers=4)


@pytest.mark.parametrize(("trainers", "width"), [(0, 1), (1, 0)])
def test_empty_sides_are_refused(trainers: int, width: int) -> None:
    with pytest.raises(MembershipError, match="must be at least 1"):
        Membership(1, trainers, (0,), width)


@pytest.mark.parametrize("shards", [(1, 0), (0, 0), (-1, 0)])
def test_shards_out_of_order_are_refused(shards: tuple[int, ...]) -> None:
    with pytest.raises(MembershipError, match="sorted, distinct"):
        Membership(1, 1, shards, 1)


def test_an_absent_shard_has_no_rank() -> None:
    with pytest.raises(MembershipError, match="shard 1 is absent"):
        planned(absent=(1,)).group_rank(1, 0)


def test_a_worker_beyond_the_width_has_no_rank() -> None:
    with pytest.raises(MembershipError, match="worker 2 does not exist"):
        planned(width=2).worker_index(0, 2)


def test_rejoining_restores_the_membership_but_for_its_epoch() -> None:
    tracker = MembershipTracker(2, 4, 4)
    first = tracker.begin_build()
    tracker.finish_build(first)
    tracker.finish_build(tracker.begin_build([1]))
    again = tracker.begin_build()
    assert again.same_participants(first)
    assert (first.epoch, again.epoch) == (1, 3)


def test_nothing_is_built_before_the_first_build() -> None:
    tracker = MembershipTracker(2, 4, 4)
    assert tracker.built is None
    assert tracker.needs_build()


def test_a_whole_fleet_needs_no_second_build() -> None:
    tracker = MembershipTracker(2, 4, 4)
    tracker.finish_build(tracker.begin_build())
    assert not tracker.needs_build()
    assert not tracker.needs_build()


def test_the_same_absence_needs_no_second_build() -> None:
    tracker = MembershipTracker(2, 4, 4)
    tracker.finish_build(tracker.begin_build([3]))
    assert not tracker.needs_build([3, 3])


@pytest.mark.parametrize("absent", [[], [2], [3, 2]])
def test_leaving_and_rejoining_both_need_a_build(absent: list[int]) -> None:
    tracker = MembershipTracker(2, 4, 4)
    tracker.finish_build(tracker.begin_build([3]))
    assert tracker.needs_build(absent)


def test_an_abort_needs_a_build_even_if_nobody_left() -> None:
    tracker = MembershipTracker(2, 4, 4)
    tracker.finish_build(tracker.begin_build())
    tracker.invalidate()
    assert tracker.needs_build()


def test_a_build_that_did_not_finish_leaves_nothing_built() -> None:
    tracker = MembershipTracker(2, 4, 4)
    tracker.finish_build(tracker.begin_build())
    tracker.begin_build([1])
    assert tracker.built is None


def test_a_build_that_was_overtaken_is_refused() -> None:
    tracker = MembershipTracker(2, 4, 4)
    slow = tracker.begin_build()
    tracker.begin_build([1])
    with pytest.raises(MembershipError, match="epoch 1 was overtaken by 2"):
        tracker.finish_build(slow)


def test_refused_memberships_leave_the_tracker_unchanged() -> None:
    tracker = MembershipTracker(2, 1, 1)
    tracker.finish_build(tracker.begin_build())
    with pytest.raises(NoSurvivingShardsError):
        tracker.begin_build([0])
    assert tracker.built == planned(dp=1)
