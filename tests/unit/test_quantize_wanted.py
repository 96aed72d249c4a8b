"""What engines state they want quantized."""

from __future__ import annotations

import msgspec
import pytest

from weight_sync.errors import QuantizationError
from weight_sync.quantize.format import Format
from weight_sync.quantize.wanted import QuantSpec, unite, want


@pytest.mark.parametrize(
    ("form", "suffix", "scale_name", "dtype"),
    [
        (Format.MXFP8, None, "up.weight_scale", "uint8"),
        (Format.MXFP8, "_scale_from_checkpoint", "up.weight_scale_from_checkpoint", "uint8"),
        (Format.FP8_BLOCK, None, "up.weight_scale_inv", "float32"),
        (Format.FP8_TENSOR, None, "up.weight_scale", "float32"),
    ],
)
def test_scale_is_named_after_the_value(
    form: Format, suffix: str | None, scale_name: str, dtype: str
) -> None:
    spec = want("up.weight", form, (64, 64), suffix)
    assert (spec.value_name, spec.scale_name) == ("up.weight", scale_name)
    assert (spec.value_dtype, spec.scale_dtype) == ("float8_e4m3fn", dtype)


def test_unknown_suffix_is_refused() -> None:
    with pytest.raises(QuantizationError, match="_zero_point"):
        want("up.weight", Format.MXFP8, (64, 64), "_zero_point")


def test_spec_survives_the_wire() -> None:
    spec = want("up.weight", Format.MXFP8, (4, 32, 64))
    raw = msgspec.msgpack.encode([spec])
    assert msgspec.msgpack.decode(raw, type=list[QuantSpec]) == [spec]


def test_stated_scale_shape_must_be_that_of_the_format() -> None:
    with pytest.raises(QuantizationError, match=r"up\.weight.*scale of shape \[8, 2\]"):
        QuantSpec(
            "up.weight",
            Format.MXFP8,
            "up.weight",
            "up.weight_scale",
            (8, 64),
            (16,),
            "float8_e4m3fn",
            "uint8",
        )


def test_stages_are_united_in_name_order() -> None:
    a, b, c = (want(f"{n}.weight", Format.MXFP8, (8, 64)) for n in "abc")
    assert unite([[c, b], [], [a, b]]) == (a, b, c)


def test_stages_that_disagree_are_refused_by_name() -> None:
    one = want("a.weight", Format.MXFP8, (8, 64))
    other = want("a.weight", Format.FP8_TENSOR, (8, 64))
    with pytest.raises(QuantizationError, match=r"a\.weight"):
        unite([[one], [other]])
