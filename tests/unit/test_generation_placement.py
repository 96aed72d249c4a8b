"""Which bundles make a shard."""

from __future__ import annotations

import pytest

from generation.errors import GenerationConfigError
from generation.placement import (
    Bundle,
    needs_one_group,
    place_shards,
    usable_bundles_per_node,
)


def bundles(*per_node: int, one_group: bool = False) -> list[Bundle]:
    found = [(node, i) for node, count in enumerate(per_node) for i in range(count)]
    if one_group:
        return [Bundle(node, 0, n) for n, (node, _) in enumerate(found)]
    return [Bundle(node, node, i) for node, i in found]


def rows(places: object) -> list[tuple[int, list[int]]]:
    return [(p.node, [b.index for b in p.bundles]) for p in places]  # type: ignore[attr-defined]


def test_shards_are_neighbours_on_one_node():
    places = place_shards(bundles(4, 4), 2, (4, 4))
    assert rows(places) == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1]), (1, [2, 3])]
    assert not any(place.spans_nodes for place in places)


def test_the_order_bundles_are_listed_in_does_not_matter():
    shuffled = list(reversed(bundles(3, 3)))
    assert place_shards(shuffled, 3, (3, 3)) == place_shards(bundles(3, 3), 3, (3, 3))


def test_a_shard_never_straddles_nodes_it_could_fit_on():
    assert rows(place_shards(bundles(3, 3), 2, (3, 3))) == [(0, [0, 1]), (1, [0, 1])]


def test_a_shard_wider_than_a_node_spans_nodes_of_one_group():
    assert needs_one_group((2, 2), 4)
    (place,) = place_shards(bundles(2, 2, one_group=True), 4, (2, 2))
    assert [b.index for b in place.bundles] == [0, 1, 2, 3]
    assert place.spans_nodes


def test_only_the_asked_number_of_workers_of_a_node_is_used():
    used = usable_bundles_per_node((4, 4), [2, 4])
    assert rows(place_shards(bundles(4, 4), 2, used)) == [(0, [0, 1]), (1, [0, 1]), (1, [2, 3])]
    assert usable_bundles_per_node((4, 4), 1) == (1, 1)
    assert usable_bundles_per_node((4, 4), None) == (4, 4)


@pytest.mark.parametrize("wanted", [5, [4], [4, 5], [-1, 1]])
def test_workers_that_nodes_do_not_have_are_refused(wanted: int | list[int]):
    with pytest.raises(GenerationConfigError, match="do not fit"):
        usable_bundles_per_node((4, 4), wanted)


def test_no_placement_groups_is_an_error_that_says_what_to_call():
    with pytest.raises(ValueError, match="init_placement_groups"):
        place_shards([], 1, (1,))


def test_too_few_bundles_for_one_shard_is_an_error():
    with pytest.raises(ValueError, match="cannot place one shard of 4"):
        place_shards(bundles(3), 4, (3,))
