"""Arrays on the wire: exact round trips, and sizes that are checked before use."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from weight_sync.arrays import PackedArray, pack
from weight_sync.errors import LayoutError

dtypes = st.sampled_from([np.int32, np.int64, np.uint64, np.uint8])


@given(dtypes.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0))))
def test_arrays_come_back_equal(array: np.ndarray) -> None:
    out = pack(array).unpack()
    assert out.dtype == array.dtype
    np.testing.assert_array_equal(out, array)


def test_strided_arrays_are_packed_in_row_major_order() -> None:
    array = np.arange(12, dtype=np.int64).reshape(3, 4).T
    np.testing.assert_array_equal(pack(array).unpack(), array)


def test_unpacked_arrays_are_read_only() -> None:
    assert not pack(np.zeros(3, np.int64)).unpack().flags.writeable


@pytest.mark.parametrize("data", [b"", b"\0" * 23, b"\0" * 25])
def test_a_wrong_byte_count_is_refused(data: bytes) -> None:
    with pytest.raises(LayoutError, match="needs 24 bytes"):
        PackedArray("int64", (3,), data).unpack()


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(LayoutError, match="negative"):
        PackedArray("int64", (-1, -1), b"\0" * 8).unpack()


@pytest.mark.parametrize("dtype", ["object", "float64", "<U4", ""])
def test_other_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(LayoutError, match="is not one of"):
        PackedArray(dtype, (1,), b"\0" * 8).unpack()


def test_packing_another_dtype_is_refused() -> None:
    with pytest.raises(LayoutError, match="float64 is not one of"):
        pack(np.zeros(2))
