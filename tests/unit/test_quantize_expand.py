"""A trainer rank's tensors become values and scales in one unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.errors import QuantizationError
from weight_sync.layout import Box, full_box
from weight_sync.manifest import TensorSpec, build_manifest
from weight_sync.quantize.expand import expand, scale_box, shares_scale
from weight_sync.quantize.format import TILE, Format, scale_shape
from weight_sync.quantize.wanted import QuantSpec, want


def _offer(name: str, shape: tuple[int, ...], *boxes: Box) -> tuple[TensorSpec, list[Box]]:
    return TensorSpec(name, "bfloat16", shape), list(boxes) or [full_box(shape)]


def _mx(name: str, shape: tuple[int, ...]) -> QuantSpec:
    return want(name, Format.MXFP8, shape)


def test_wanted_tensor_becomes_value_and_scale_of_one_unit() -> None:
    value, scale = expand([_offer("a.weight", (8, 64))], [_mx("a.weight", (8, 64))])
    assert value[0] == TensorSpec("a.weight", "float8_e4m3fn", (8, 64), unit="a.weight")
    assert scale[0] == TensorSpec("a.weight_scale", "uint8", (8, 2), unit="a.weight")


def test_tensor_that_nobody_wants_stays_as_it_was() -> None:
    offer = _offer("norm.weight", (8,))
    assert expand([offer], [_mx("a.weight", (8, 64))]) == [offer]


def test_result_builds_a_manifest_with_matching_regions() -> None:
    offer = _offer("a.weight", (4, 8, 64), Box((2, 0, 32), (1, 8, 32)))
    manifest = build_manifest(0, "h", "cpu", expand([offer], [_mx("a.weight", (4, 8, 64))]))
    assert [box for _, box in manifest.regions()] == [
        Box((2, 0, 32), (1, 8, 32)),
        Box((2, 0, 1), (1, 8, 1)),
    ]


def test_shard_that_cuts_a_block_is_refused_with_the_nearest_cuts() -> None:
    offers = [
        _offer("a.weight", (8, 96), Box((0, 0), (8, 48))),
        _offer("b.weight", (8, 96), Box((0, 0), (8, 64))),
    ]
    wanted = [_mx("a.weight", (8, 96)), _mx("b.weight", (8, 96))]
    with pytest.raises(QuantizationError, match="move the cut at K=48 to 32 or 64") as caught:
        expand(offers, wanted)
    assert "a.weight" in str(caught.value)
    assert "b.weight" not in str(caught.value)


def test_every_cut_tensor_is_named() -> None:
    offers = [_offer(f"{n}.weight", (8, 64), Box((0, 16), (8, 48))) for n in "abc"]
    with pytest.raises(QuantizationError) as caught:
        expand(offers, [_mx(f"{n}.weight", (8, 64)) for n in "abc"])
    assert all(f"{n}.weight" in str(caught.value) for n in "abc")


def test_block_may_end_short_at_the_edge_of_the_tensor_only() -> None:
    spec = want("a.weight", Format.FP8_BLOCK, (200, 300))
    edge = _offer("a.weight", (200, 300), Box((128, 256), (72, 44)))
    assert expand([edge], [spec])[1][1] == [Box((1, 2), (1, 1))]
    cut = _offer("a.weight", (200, 300), Box((0, 0), (100, 300)))
    with pytest.raises(QuantizationError, match="move the cut at N=100 to 0 or 128"):
        expand([cut], [spec])


def test_empty_region_cuts_nothing() -> None:
    offer = _offer("a.weight", (8, 64), Box((0, 48), (8, 0)))
    assert expand([offer], [_mx("a.weight", (8, 64))])[1][1] == [Box((0, 1), (8, 0))]


def test_another_shape_than_the_engine_has_is_refused() -> None:
    with pytest.raises(QuantizationError, match=r"a\.weight has shape \[8, 32\]"):
        expand([_offer("a.weight", (8, 32))], [_mx("a.weight", (8, 64))])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "float16"])
def test_only_bf16_and_float32_are_quantized(dtype: str) -> None:
    tensor = TensorSpec("a.weight", dtype, (8, 64))
    with pytest.raises(QuantizationError, match=rf"a\.weight is {dtype}"):
        expand([(tensor, [])], [_mx("a.weight", (8, 64))])


@pytest.mark.parametrize("only", ["a.weight", "b.weight"])
def test_tied_tensors_are_quantized_both_or_not_at_all(only: str) -> None:
    offers = [
        _offer("a.weight", (8, 64)),
        (TensorSpec("b.weight", "bfloat16", (8, 64), alias_of="a.weight"), []),
    ]
    with pytest.raises(QuantizationError, match=r"b\.weight is tied to a\.weight"):
        expand(offers, [_mx(only, (8, 64))])


def test_tied_tensors_stay_tied_value_to_value_and_scale_to_scale() -> None:
    tied = (TensorSpec("b.weight", "bfloat16", (8, 64), alias_of="a.weight"), [])
    wanted = [_mx("a.weight", (8, 64)), _mx("b.weight", (8, 64))]
    out = [tensor for tensor, _ in expand([tied], wanted)]
    assert [t.alias_of for t in out] == ["a.weight", "a.weight_scale"]


@given(rows=st.integers(1, 400), tiles=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_block_scale_regions_of_aligned_shards_tile_the_scale(rows: int, tiles: list[int]) -> None:
    cols = sum(tiles) * TILE - 5
    at, covered = 0, 0
    for n in tiles:
        size = min(n * TILE, cols - at)
        box = scale_box(Format.FP8_BLOCK, Box((0, at), (rows, size)))
        assert box.offset == (0, covered)
        covered += box.size[1]
        at += size
    assert (box.size[0], covered) == scale_shape(Format.FP8_BLOCK, (rows, cols))


def test_ranks_with_parts_of_a_matrix_share_its_scale() -> None:
    spec = want("a.weight", Format.FP8_TENSOR, (4, 8, 64))
    part, whole = Box((1, 0, 0), (2, 4, 64)), Box((1, 0, 0), (2, 8, 64))
    assert (shares_scale(spec, part), shares_scale(spec, whole)) == (True, False)
    assert scale_box(spec.format, part) == Box((1,), (2,))
