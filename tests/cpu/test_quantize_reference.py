"""The reference against an independent one: float64 arithmetic and torch's own format casts."""

from __future__ import annotations

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.errors import QuantizationError
from weight_sync.quantize.format import Format, scale_shape
from weight_sync.quantize.reference import decode, encode, finite_amax

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
DTYPES = st.sampled_from(list(BITS))
FLOAT_FORMATS = [Format.FP8_TENSOR, Format.FP8_BLOCK]


@st.composite
def _any_bits(draw: st.DrawFn, cols: st.SearchStrategy[int]) -> torch.Tensor:
    """Any bit pattern: every exponent, subnormals, zeros of both signs, NaN and infinities."""
    dtype = draw(DTYPES)
    shape = (draw(st.integers(1, 3)), draw(cols))
    raw = draw(
        st.binary(min_size=prod(shape) * dtype.itemsize, max_size=prod(shape) * dtype.itemsize)
    )
    return torch.frombuffer(bytearray(raw), dtype=BITS[dtype]).view(dtype).reshape(shape)


@st.composite
def _weights(draw: st.DrawFn, cols: st.SearchStrategy[int]) -> torch.Tensor:
    """Weights as models have them, at any magnitude."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (draw(st.integers(1, 3)), draw(cols))
    magnitude = 2.0 ** draw(st.integers(-140, 100))
    return (torch.randn(shape, generator=generator) * magnitude).to(draw(DTYPES))


BLOCKS = st.integers(1, 4).map(lambda n: 32 * n)
ANY_COLS = st.integers(1, 300)


def _mxfp8_float64(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.double().unflatten(-1, (-1, 32))
    amax = torch.where(blocks.isfinite(), blocks.abs(), 0.0).amax(-1)
    exponent = torch.where(amax > 0, torch.frexp(amax).exponent - 1, -1000)
    scale = torch.exp2((exponent - 8).clamp(-126, 127).double())
    scaled = (blocks / scale[..., None]).clamp(-448, 448)
    value = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    value[~x.isfinite()] = 0x7F
    return value, scale.to(torch.float8_e8m0fnu).view(torch.uint8)


def _block_scale(form: Format, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The scale of every element, float64, by way of the e8m0 cast or the float32 scale."""
    if form is Format.MXFP8:
        return scale.view(torch.float8_e8m0fnu).double().repeat_interleave(32, -1)
    if form is Format.FP8_TENSOR:
        return scale.double()[..., None, None].expand(x.shape)
    wide = scale.double().repeat_interleave(128, -2).repeat_interleave(128, -1)
    return wide[..., : x.shape[-2], : x.shape[-1]]


def _float_scale_float64(form: Format, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tile = x.shape[-2:] if form is Format.FP8_TENSOR else (128, 128)
    scale = torch.empty(-(-x.shape[0] // tile[0]), -(-x.shape[1] // tile[1]))
    value = torch.empty(x.shape, dtype=torch.uint8)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = (slice(i * tile[0], (i + 1) * tile[0]), slice(j * tile[1], (j + 1) * tile[1]))
            part = x[at].double()
            amax = (
                part[part.isfinite()].abs().max() if part.isfinite().any() else part.new_zeros(())
            )
            # Each float32 operation is the float64 one rounded once more, which is exact for these.
            scale[i, j] = (amax / 448).clamp(min=2.0**-126).float()
            inverse = (1 / scale[i, j].double()).float().double()
            scaled = (part * inverse).float().clamp(-448, 448)
            value[at] = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    value[~x.isfinite()] = 0x7F
    return value, scale.reshape(scale_shape(form, x.shape))


@settings(deadline=None)
@given(x=_any_bits(BLOCKS) | _weights(BLOCKS))
def test_mxfp8_is_the_float64_rule_bit_by_bit(x: torch.Tensor) -> None:
    value, scale = _mxfp8_float64(x)
    encoded = encode(Format.MXFP8, x)
    assert torch.equal(encoded.scale, scale)
    assert torch.equal(encoded.value, value)


@pytest.mark.parametrize("form", FLOAT_FORMATS)
@settings(deadline=None)
@given(x=_any_bits(ANY_COLS) | _weights(ANY_COLS))
def test_float_scaled_formats_are_the_float64_rule_bit_by_bit(
    form: Format, x: torch.Tensor
) -> None:
    value, scale = _float_scale_float64(form, x)
    encoded = encode(form, x)
    assert torch.equal(encoded.scale, scale)
    assert torch.equal(encoded.value, value)


@pytest.mark.parametrize("form", list(Format))
@settings(deadline=None)
@given(x=_any_bits(BLOCKS) | _weights(BLOCKS))
def test_error_of_every_number_stays_within_the_stated_bound(form: Format, x: torch.Tensor) -> None:
    encoded = encode(form, x)
    exact, found = x.double(), decode(form, encoded.value, encoded.scale).double()
    scale = _block_scale(form, encoded.scale, x)
    ratio, size = exact.abs() / scale, exact.abs()
    rounding = 0.0 if form is Format.MXFP8 else 2.0**-22
    bound = torch.where(ratio <= 2.0**-6, scale * 2.0**-10, size * 2.0**-4) + size * rounding
    if form is Format.MXFP8:
        bound = torch.where(ratio > 448, size * 2.0**-3, bound)
    numbers = exact.isfinite()
    # Decoding happens in float32, whose own subnormals are the floor of any error bound.
    assert ((found - exact).abs() <= bound + 2.0**-149)[numbers].all()
    assert (ratio < 512)[numbers].all()


@settings(deadline=None)
@given(x=_any_bits(BLOCKS))
def test_scale_byte_is_never_0_or_255(x: torch.Tensor) -> None:
    scale = encode(Format.MXFP8, x).scale
    assert scale.min() >= 1
    assert scale.max() <= 254


@settings(deadline=None)
@given(x=_weights(BLOCKS))
def test_largest_of_a_block_lands_in_the_top_binade(x: torch.Tensor) -> None:
    encoded = encode(Format.MXFP8, x)
    top = encoded.value.view(torch.float8_e4m3fn).float().abs().unflatten(-1, (-1, 32)).amax(-1)
    assert ((top >= 256) | (encoded.scale == 1)).all()


@pytest.mark.parametrize("dtype", list(BITS))
def test_b14_zero_block_and_saturating_block(dtype: torch.dtype) -> None:
    x = torch.zeros(1, 64, dtype=dtype)
    x[0, 32], x[0, 33:] = 0.96875, 0.5
    encoded = encode(Format.MXFP8, x)
    back = decode(Format.MXFP8, encoded.value, encoded.scale)
    assert encoded.scale.tolist() == [[1, 118]]
    assert back[0, :32].tolist() == [0.0] * 32
    assert back[0, 32:].tolist() == [0.875] + [0.5] * 31


@pytest.mark.parametrize(("shape", "scales"), [((4, 32, 64), (4, 32, 2)), ((4, 8, 32), (4, 8, 1))])
def test_b14_grouped_experts_keep_their_dimensions(
    shape: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    encoded = encode(Format.MXFP8, x)
    assert (tuple(encoded.value.shape), tuple(encoded.scale.shape)) == (shape, scales)
    for e in range(shape[0]):
        assert torch.equal(encode(Format.MXFP8, x[e]).value, encoded.value[e])


@pytest.mark.parametrize(
    ("scaled", "expected"),
    [
        (17.0, 16.0),
        (19.0, 20.0),
        (17.001, 18.0),
        (2.0**-10, 0.0),
        (1.5 * 2.0**-9, 2.0**-8),
        (-17, -16),
    ],
)
def test_ties_go_to_the_even_neighbour(scaled: float, expected: float) -> None:
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1] = 256.0, scaled
    encoded = encode(Format.MXFP8, x)
    assert decode(Format.MXFP8, encoded.value, encoded.scale)[0, 1] == expected


@pytest.mark.parametrize("form", list(Format))
def test_nan_stays_where_it_is_and_leaves_the_others_alone(form: Format) -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    x[0, 3] = 0.0
    clean = encode(form, x)
    x[0, 3] = torch.nan
    dirty = encode(form, x)
    clean.value[0, 3] = 0x7F
    assert torch.equal(dirty.value, clean.value)
    assert torch.equal(dirty.scale, clean.scale)
    assert dirty.infinities == 0


@pytest.mark.parametrize("form", list(Format))
def test_infinities_are_counted_and_do_not_set_the_scale(form: Format) -> None:
    x = torch.ones(2, 64)
    plain = encode(form, x)
    x[0, 3], x[1, 40] = torch.inf, -torch.inf
    encoded = encode(form, x)
    assert torch.equal(encoded.scale, plain.scale)
    assert encoded.infinities == 2


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("fill", [0.0, torch.nan])
def test_tensor_without_any_magnitude_has_the_least_scale(form: Format, fill: float) -> None:
    x = torch.full((2, 64), fill)
    encoded = encode(form, x)
    assert (encoded.scale == (1 if form is Format.MXFP8 else 2.0**-126)).all()
    back = decode(form, encoded.value, encoded.scale)
    assert torch.equal(back.isnan(), x.isnan())
    assert not back.nan_to_num().any()


def test_sign_of_zero_is_kept() -> None:
    x = torch.tensor([[0.0, -0.0] * 16])
    assert encode(Format.MXFP8, x).value[0, :2].tolist() == [0x00, 0x80]


def test_subnormal_float32_weights_are_ordinary_numbers() -> None:
    x = torch.full((1, 32), 2.0**-130)
    encoded = encode(Format.MXFP8, x)
    assert torch.equal(decode(Format.MXFP8, encoded.value, encoded.scale), x)


def test_largest_float32_does_not_overflow() -> None:
    x = torch.full((1, 32), torch.finfo(torch.float32).max)
    encoded = encode(Format.MXFP8, x)
    assert encoded.scale.tolist() == [[246]]
    assert decode(Format.MXFP8, encoded.value, encoded.scale).tolist() == [[448 * 2.0**119] * 32]


@pytest.mark.parametrize("form", list(Format))
def test_strides_of_the_source_do_not_matter(form: Format) -> None:
    wide = torch.randn(3, 70, 200, generator=torch.Generator().manual_seed(3))
    view = wide[1:, 3:67, 8:136]
    one, other = encode(form, view), encode(form, view.contiguous())
    assert torch.equal(one.value, other.value)
    assert torch.equal(one.scale, other.scale)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_mxfp8_shard_is_the_slice_of_the_whole(dim: int) -> None:
    x = torch.randn(4, 64, 128, generator=torch.Generator().manual_seed(4)).bfloat16()
    whole = encode(Format.MXFP8, x)
    size = x.shape[dim] // 4
    for part in range(4):
        shard = encode(Format.MXFP8, x.narrow(dim, part * size, size))
        scales = whole.scale.shape[dim] // 4
        assert torch.equal(shard.value, whole.value.narrow(dim, part * size, size))
        assert torch.equal(shard.scale, whole.scale.narrow(dim, part * scales, scales))


@pytest.mark.parametrize("dim", [0, 1])
def test_fp8_block_shard_is_the_slice_of_the_whole(dim: int) -> None:
    x = torch.randn(300, 290, generator=torch.Generator().manual_seed(5))
    whole = encode(Format.FP8_BLOCK, x)
    for start, scale in ((0, 0), (256, 2)):
        size = min(256, x.shape[dim] - start)
        shard = encode(Format.FP8_BLOCK, x.narrow(dim, start, size))
        assert torch.equal(shard.value, whole.value.narrow(dim, start, size))
        assert torch.equal(shard.scale, whole.scale.narrow(dim, scale, -(-size // 128)))


def test_fp8_tensor_shard_with_the_common_maximum_is_the_slice_of_the_whole() -> None:
    x = torch.randn(3, 64, 50, generator=torch.Generator().manual_seed(6))
    whole = encode(Format.FP8_TENSOR, x)
    shards = x.split(16, 1)
    amax = torch.stack([finite_amax(s) for s in shards]).amax(0)
    encoded = [encode(Format.FP8_TENSOR, s, amax) for s in shards]
    assert torch.equal(torch.cat([e.value for e in encoded], 1), whole.value)
    assert all(torch.equal(e.scale, whole.scale) for e in encoded)


@pytest.mark.parametrize("form", list(Format))
def test_scale_of_another_shape_is_refused(form: Format) -> None:
    encoded = encode(form, torch.ones(4, 64))
    with pytest.raises(QuantizationError, match="needs a scale of shape"):
        decode(form, encoded.value, torch.cat([encoded.scale.reshape(1, -1)] * 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(QuantizationError, match=f"cannot quantize a {dtype}"):
        encode(Format.MXFP8, torch.zeros(1, 32).to(dtype))
