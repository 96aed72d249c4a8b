"""The regions of all ranks together: replicas, holes, overlaps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import cut, manifest

from weight_sync.errors import LayoutError
from weight_sync.layout import Box, full_box
from weight_sync.manifest import TensorSpec, build_catalogue
from weight_sync.regions import Regions, unite

W = TensorSpec("w", "bfloat16", (6, 4))
V = TensorSpec("v", "bfloat16", (6, 4))


def united(*held: list[Box]) -> Regions:
    manifests = [manifest(rank, [(W, boxes)]) for rank, boxes in enumerate(held)]
    return unite(build_catalogue(manifests), manifests)


def rows(start: int, count: int) -> Box:
    return Box((start, 0), (count, 4))


def owners(regions: Regions) -> dict[Box, list[int]]:
    return {
        Box(tuple(o), tuple(n)): regions.owner_rank[a:b].tolist()
        for o, n, a, b in zip(
            regions.offset.tolist(),
            regions.size.tolist(),
            regions.owner_first[:-1],
            regions.owner_first[1:],
            strict=True,
        )
    }


def test_equal_regions_are_one_region_with_several_owners() -> None:
    regions = united([rows(0, 3)], [rows(3, 3)], [rows(0, 3)], [rows(3, 3)])
    assert owners(regions) == {rows(0, 3): [0, 2], rows(3, 3): [1, 3]}


def test_owner_regions_are_numbers_in_the_owners_manifest() -> None:
    regions = united([rows(3, 3), rows(0, 3)], [rows(0, 3)])
    assert regions.owner_rank.tolist() == [0, 1, 0]
    assert regions.owner_region.tolist() == [1, 0, 0]


def test_a_shard_of_a_replicated_tensor_makes_cells_with_their_owners() -> None:
    assert owners(united([full_box((6, 4))], [rows(2, 2)])) == {
        rows(2, 2): [0, 1],
        rows(0, 2): [0],
        rows(4, 2): [0],
    }


def test_tensors_cut_along_one_dimension_are_searchable() -> None:
    assert united([rows(0, 3)], [rows(3, 3)]).cut_dim.tolist() == [0]
    assert united([Box((0, 0), (6, 1))], [Box((0, 1), (6, 3))]).cut_dim.tolist() == [1]


def test_tensors_cut_along_two_dimensions_are_scanned() -> None:
    quarters = [[Box((r, c), (3, 2))] for r in (0, 3) for c in (0, 2)]
    assert united(*quarters).cut_dim.tolist() == [-1]


@pytest.mark.parametrize("held", [[rows(0, 5)], [rows(1, 5)], []])
def test_a_hole_is_refused_with_the_tensor_and_its_shape(held: list[Box]) -> None:
    manifests = [manifest(0, [(W, held), (V, [full_box((6, 4))])])]
    with pytest.raises(LayoutError, match=r"w \(global shape \[6, 4\], (20|0) of 24 elements"):
        unite(build_catalogue(manifests), manifests)


def test_an_overlap_does_not_hide_a_hole() -> None:
    with pytest.raises(LayoutError, match="20 of 24 elements"):
        united([rows(0, 4)], [rows(1, 4)])


def test_trainers_without_any_region_are_refused() -> None:
    with pytest.raises(LayoutError, match="is the module empty"):
        unite(build_catalogue([manifest(0, [])]), [manifest(0, [])])


def test_an_empty_tensor_needs_no_owner() -> None:
    empty = TensorSpec("empty", "float32", (0, 64))
    manifests = [manifest(0, [(empty, []), (W, [full_box((6, 4))])])]
    assert owners(unite(build_catalogue(manifests), manifests)) == {full_box((6, 4)): [0]}


def test_scalars_have_one_region() -> None:
    scalar = TensorSpec("s", "float32", ())
    manifests = [manifest(rank, [(scalar, [full_box(())])]) for rank in range(2)]
    regions = unite(build_catalogue(manifests), manifests)
    assert regions.owner_rank.tolist() == [0, 1]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(1, 6), st.integers(1, 4)),
            max_size=3,
        ),
        max_size=4,
    )
)
def test_any_overlap_becomes_disjoint_cells_of_true_owners(
    claims: list[list[tuple[int, int, int, int]]],
) -> None:
    held = [[full_box((6, 4))]] + [
        [Box((r, c), (min(h, 6 - r), min(w, 4 - c))) for r, c, h, w in boxes] for boxes in claims
    ]
    held = [list(dict.fromkeys(boxes)) for boxes in held]
    claimed = np.zeros((len(held), 6, 4), bool)
    for rank, boxes in enumerate(held):
        for box in boxes:
            cut(claimed[rank], box)[...] = True
    covered = np.zeros((6, 4), int)
    for box, ranks in owners(united(*held)).items():
        cut(covered, box)[...] += 1
        assert ranks
        for rank in ranks:
            assert cut(claimed[rank], box).all()
    assert (covered == 1).all()
