"""Senders: near owners first, and equal loads among them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from plan_cases import manifest

from weight_sync.assign import assign, cheapest, owner_sets, pour
from weight_sync.layout import Box, full_box
from weight_sync.manifest import TensorSpec, build_catalogue
from weight_sync.regions import Regions, unite

I64 = NDArray[np.int64]


def spread(
    regions: Regions,
    nbytes: I64,
    cost: NDArray[np.int8],
    unit: NDArray[np.int32] | None = None,
) -> list[NDArray[np.int32]]:
    """Senders of every region for workers of one class, one per column of ``cost``."""
    rows = np.arange(len(nbytes), dtype=np.int64)
    if unit is None:
        unit = np.full(len(nbytes), -1, np.int32)
    return assign(regions, [rows], [nbytes], [unit], [0] * cost.shape[1], cost)


def replicas(trainers: int, tensors: int) -> Regions:
    """Tensors that every trainer rank holds whole."""
    specs = [TensorSpec(f"t{i:04d}", "uint8", (64,)) for i in range(tensors)]
    held = [(spec, [full_box(spec.shape)]) for spec in specs]
    manifests = [manifest(rank, held) for rank in range(trainers)]
    return unite(build_catalogue(manifests), manifests)


def loads(senders: list[NDArray[np.int32]], nbytes: I64, trainers: int) -> I64:
    return sum(np.bincount(s, weights=nbytes, minlength=trainers).astype(np.int64) for s in senders)


@given(
    amount=st.integers(0, 10_000), levels=st.lists(st.integers(0, 2_000), min_size=1, max_size=7)
)
def test_pouring_fills_the_lowest_first(amount: int, levels: list[int]) -> None:
    shares = pour(amount, levels)
    assert sum(shares) == amount
    assert min(shares) >= 0
    after = [level + share for level, share in zip(levels, shares, strict=True)]
    reached = max((a for a, share in zip(after, shares, strict=True) if share), default=0)
    assert all(a >= reached - 1 for a in after)


def test_the_cheapest_owners_are_all_those_with_the_lowest_cost() -> None:
    assert cheapest((0, 2, 3), np.array([1, 0, 1, 5], np.int8)) == (0, 2)


def test_owner_sets_are_numbered_once() -> None:
    spec = TensorSpec("w", "uint8", (4, 1))
    manifests = [
        manifest(0, [(spec, [Box((0, 0), (2, 1)), Box((2, 0), (1, 1))])]),
        manifest(1, [(spec, [Box((2, 0), (1, 1)), Box((3, 0), (1, 1))])]),
        manifest(2, [(spec, [Box((3, 0), (1, 1))])]),
        manifest(3, [(spec, [Box((2, 0), (1, 1))])]),
    ]
    numbers, sets = owner_sets(unite(build_catalogue(manifests), manifests))
    assert [sets[n] for n in numbers] == [(0,), (0, 1, 3), (1, 2)]


@pytest.mark.parametrize(("trainers", "workers"), [(2, 1), (4, 3), (8, 2), (3, 8)])
def test_replicas_share_the_work_evenly(trainers: int, workers: int) -> None:
    regions = replicas(trainers, 96)
    nbytes = np.full(96, 64, np.int64)
    cost = np.zeros((trainers, workers), np.int8)
    sent = loads(spread(regions, nbytes, cost), nbytes, trainers)
    assert sent.max() - sent.min() <= 64


@given(
    st.lists(st.integers(1, 5_000), min_size=8, max_size=60), st.integers(2, 5), st.integers(1, 4)
)
def test_no_sender_exceeds_the_mean_by_more_than_a_piece_per_boundary(
    sizes: list[int], trainers: int, workers: int
) -> None:
    regions = replicas(trainers, len(sizes))
    nbytes = np.array(sizes, np.int64)
    cost = np.zeros((trainers, workers), np.int8)
    sent = loads(spread(regions, nbytes, cost), nbytes, trainers)
    assert sent.sum() == nbytes.sum() * workers
    assert sent.max() <= sent.mean() + nbytes.max()


def test_nearer_owners_send_even_if_others_are_idle() -> None:
    regions = replicas(3, 10)
    cost = np.array([[0, 1], [1, 0], [1, 1]], np.int8)
    first, second = spread(regions, np.full(10, 64, np.int64), cost)
    assert set(first.tolist()) == {0}
    assert set(second.tolist()) == {1}


def test_replicas_fill_up_what_single_owners_leave() -> None:
    own = TensorSpec("a", "uint8", (64,))
    shared = TensorSpec("b", "uint8", (64,))
    manifests = [
        manifest(0, [(own, [full_box((64,))]), (shared, [full_box((64,))])]),
        manifest(1, [(shared, [full_box((64,))])]),
    ]
    regions = unite(build_catalogue(manifests), manifests)
    (senders,) = spread(regions, np.full(2, 64, np.int64), np.zeros((2, 1), np.int8))
    assert senders.tolist() == [0, 1]


def test_a_sender_serves_a_run_of_neighbours() -> None:
    regions = replicas(4, 40)
    (senders,) = spread(regions, np.full(40, 64, np.int64), np.zeros((4, 1), np.int8))
    assert np.count_nonzero(np.diff(senders)) == 3


@given(st.integers(1, 20), st.integers(2, 5), st.integers(1, 3), st.data())
def test_a_unit_is_sent_by_one_owner(
    units: int, trainers: int, workers: int, data: st.DataObject
) -> None:
    regions = replicas(trainers, 2 * units)
    # Values first and scales last, as loaders may read them.
    unit = np.tile(np.arange(units, dtype=np.int32), 2)
    nbytes = np.array(data.draw(st.lists(st.integers(1, 900), min_size=units, max_size=units)))
    both = np.concatenate([nbytes * 32, nbytes]).astype(np.int64)
    senders = spread(regions, both, np.zeros((trainers, workers), np.int8), unit)
    for sender in senders:
        assert (sender[:units] == sender[units:]).all()
    assert loads(senders, both, trainers).max() <= both.sum() * workers / trainers + 33 * max(
        nbytes
    )
