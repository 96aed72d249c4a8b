"""Shapes and names of the quantized formats."""

from __future__ import annotations

import pytest

from weight_sync.errors import QuantizationError
from weight_sync.quantize.format import Format, scale_shape


@pytest.mark.parametrize(
    ("form", "shape", "expected"),
    [
        (Format.MXFP8, (6, 64), (6, 2)),
        (Format.MXFP8, (4, 32, 64), (4, 32, 2)),
        (Format.MXFP8, (6, 32), (6, 1)),
        (Format.MXFP8, (0, 64), (0, 2)),
        (Format.FP8_TENSOR, (6, 7), ()),
        (Format.FP8_TENSOR, (4, 6, 7), (4,)),
        (Format.FP8_BLOCK, (128, 128), (1, 1)),
        (Format.FP8_BLOCK, (129, 300), (2, 3)),
        (Format.FP8_BLOCK, (4, 1, 257), (4, 1, 3)),
    ],
)
def test_scale_shape_follows_the_blocks(
    form: Format, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert scale_shape(form, shape) == expected


@pytest.mark.parametrize("cols", [1, 31, 33, 48])
def test_mxfp8_refuses_a_k_that_is_no_multiple_of_32_by_name(cols: int) -> None:
    with pytest.raises(QuantizationError, match=rf"a\.weight has K = {cols}.*pad K to"):
        scale_shape(Format.MXFP8, (8, cols), "a.weight")


@pytest.mark.parametrize("form", list(Format))
def test_vectors_are_refused_by_name(form: Format) -> None:
    with pytest.raises(QuantizationError, match=r"norm\.weight"):
        scale_shape(form, (64,), "norm.weight")
