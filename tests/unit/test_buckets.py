"""Buckets: bounded, aligned, in order, and never splitting a unit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.buckets import ALIGN, Buckets, cut
from weight_sync.errors import ConfigError

KIB64 = 64 << 10
EDGE_SIZES = (10, 65_536, 65_537, 131_072, 200_000)


def alone(sizes: list[int], limit: int) -> Buckets:
    return cut(np.array(sizes, np.int64), np.full(len(sizes), -1, np.int32), limit)


def padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@pytest.mark.parametrize("sizes", list(itertools.permutations(EDGE_SIZES)))
def test_oversized_tensors_get_a_bucket_of_their_own_in_any_order(sizes: tuple[int, ...]) -> None:
    buckets = alone(list(sizes), KIB64)
    for number, used in enumerate(buckets.nbytes.tolist()):
        inside = [s for s, b in zip(sizes, buckets.bucket.tolist(), strict=True) if b == number]
        assert used <= KIB64 or (len(inside) == 1 and used == padded(inside[0]))


def test_pieces_that_fit_exactly_share_a_bucket() -> None:
    buckets = alone([KIB64 - ALIGN, 1, 1], KIB64)
    assert buckets.bucket.tolist() == [0, 0, 1]
    assert buckets.offset.tolist() == [0, KIB64 - ALIGN, 0]


def test_an_empty_stream_has_no_buckets() -> None:
    assert alone([], KIB64).count == 0


def test_pieces_without_bytes_take_no_room() -> None:
    buckets = alone([0, 10, 0], KIB64)
    assert buckets.count == 1
    assert buckets.nbytes.tolist() == [ALIGN]


def test_a_unit_that_does_not_fit_moves_to_the_next_bucket_together() -> None:
    unit = np.array([-1, 7, 7, -1], np.int32)
    buckets = cut(np.array([768, 256, 256, 256], np.int64), unit, 1024)
    assert buckets.bucket.tolist() == [0, 1, 1, 1]


def test_a_unit_larger_than_the_limit_keeps_together() -> None:
    unit = np.array([0, 0, 1, 1], np.int32)
    buckets = cut(np.array([1024, 256, 512, 256], np.int64), unit, 1024)
    assert buckets.bucket.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_that_is_not_positive_is_refused(limit: int) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        alone([1], limit)


@given(
    groups=st.lists(st.lists(st.integers(0, 5_000), min_size=1, max_size=3), max_size=30),
    limit=st.integers(1, 9_000),
)
def test_every_piece_has_its_own_aligned_place_and_units_stay_whole(
    groups: list[list[int]], limit: int
) -> None:
    sizes = [size for group in groups for size in group]
    unit = [(g if len(group) > 1 else -1) for g, group in enumerate(groups) for _ in group]
    buckets = cut(np.array(sizes, np.int64), np.array(unit, np.int32), limit)
    assert (np.diff(buckets.bucket) >= 0).all()
    ends: dict[int, int] = {}
    for size, bucket, offset in zip(sizes, buckets.bucket, buckets.offset, strict=True):
        assert offset % ALIGN == 0
        assert offset >= ends.get(int(bucket), 0)
        ends[int(bucket)] = int(offset) + padded(size)
    assert [ends[b] for b in range(buckets.count)] == buckets.nbytes.tolist()
    where: dict[int, set[int]] = {}
    for u, bucket in zip(unit, buckets.bucket.tolist(), strict=True):
        if u >= 0:
            where.setdefault(u, set()).add(bucket)
    assert all(len(found) == 1 for found in where.values())
