"""The digest's definition: fixed values, and the properties that verification rests on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.kernels import mix

U64 = st.integers(0, (1 << 64) - 1)


def by_hand(index: int) -> int:
    """``weight(index)`` in Python integers."""
    x = (index * mix.C1 ^ (index >> 32) * mix.C3) & mix.MASK32
    x ^= x >> 15
    x = x * mix.C2 & mix.MASK32
    return x ^ x >> 13 | 1


@given(st.lists(U64, min_size=1, max_size=20))
def test_weights_follow_the_formula_for_every_64_bit_index(index: list[int]) -> None:
    got = mix.weights(np.array(index, np.uint64)).tolist()
    assert got == [by_hand(i) for i in index]


@given(st.lists(U64, min_size=1, max_size=20))
def test_weights_are_odd_and_below_32_bits(index: list[int]) -> None:
    got = mix.weights(np.array(index, np.uint64))
    assert (got % 2 == 1).all()
    assert (got <= mix.MASK32).all()


def test_neighbouring_weights_do_not_repeat() -> None:
    got = mix.weights(np.arange(1 << 16, dtype=np.uint64))
    # Odd 32-bit values: two among 65536 random ones meet once on average.
    assert len(np.unique(got)) > (1 << 16) - 8


def test_the_high_half_of_the_index_matters() -> None:
    low = np.arange(1000, dtype=np.uint64)
    assert (mix.weights(low) != mix.weights(low + np.uint64(1 << 32))).sum() > 990


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_reference_is_the_sum_of_defined_terms(dtype: type[np.unsignedinteger]) -> None:
    bits = np.array([0, 1, np.iinfo(dtype).max], dtype)
    index = np.array([0, 7, (1 << 40) + 3], np.uint64)
    want = sum((int(u) + 1) * by_hand(int(i)) for u, i in zip(bits, index, strict=True))
    assert mix.reference(bits, index) == want % (1 << 64)


def test_an_8_byte_element_counts_as_its_low_and_high_half() -> None:
    whole = mix.reference(np.array([0x1122334455667788], np.uint64), np.array([5], np.uint64))
    halves = np.array([0x55667788, 0x11223344], np.uint32)
    assert whole == mix.reference(halves, np.array([10, 11], np.uint64))


def test_zeros_are_not_free() -> None:
    """A missing tail of zeros must show, so a zero element adds its weight."""
    zeros = np.zeros(4, np.uint16)
    index = np.arange(4, dtype=np.uint64)
    assert mix.reference(zeros[:3], index[:3]) != mix.reference(zeros, index)


@given(
    st.lists(st.integers(0, 0xFFFF), min_size=2, max_size=30, unique=True),
    st.data(),
)
def test_two_swapped_elements_change_the_digest(values: list[int], data: st.DataObject) -> None:
    bits = np.array(values, np.uint16)
    index = np.arange(len(values), dtype=np.uint64)
    a, b = data.draw(st.lists(st.integers(0, len(values) - 1), min_size=2, max_size=2, unique=True))
    swapped = bits.copy()
    swapped[[a, b]] = swapped[[b, a]]
    assert mix.reference(bits, index) != mix.reference(swapped, index)


def test_sums_wrap_at_64_bits() -> None:
    count = 1000
    bits = np.full(count, 0xFFFFFFFF, np.uint32)
    index = np.arange(count, dtype=np.uint64)
    exact = sum((1 << 32) * by_hand(i) for i in range(count))
    assert exact > 1 << 64
    assert mix.reference(bits, index) == exact % (1 << 64)
