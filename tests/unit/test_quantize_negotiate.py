"""The engine refuses what it did not ask for, before anything changes."""

from __future__ import annotations

import pytest

from weight_sync.errors import QuantizationError
from weight_sync.manifest import TensorSpec
from weight_sync.quantize.format import Format
from weight_sync.quantize.negotiate import check_buckets, check_offer
from weight_sync.quantize.wanted import want

WANTED = [want("a.weight", Format.MXFP8, (8, 64)), want("b.weight", Format.MXFP8, (4, 8, 64))]
PLAIN = TensorSpec("norm.weight", "bfloat16", (8,))


def _good() -> dict[str, TensorSpec]:
    tensors = [PLAIN]
    for spec in WANTED:
        tensors += [
            TensorSpec(spec.value_name, "float8_e4m3fn", spec.value_shape, unit=spec.name),
            TensorSpec(spec.scale_name, "uint8", spec.scale_shape, unit=spec.name),
        ]
    return {t.name: t for t in tensors}


def test_exactly_what_was_asked_for_is_accepted() -> None:
    check_offer(_good().values(), WANTED)


@pytest.mark.parametrize("missing", ["a.weight", "a.weight_scale"])
def test_half_a_pair_is_refused(missing: str) -> None:
    offer = _good()
    del offer[missing]
    with pytest.raises(QuantizationError, match=f"{missing} is missing"):
        check_offer(offer.values(), WANTED)


@pytest.mark.parametrize(
    "tensor",
    [
        TensorSpec("c.weight", "float8_e4m3fn", (8, 64), unit="c"),
        TensorSpec("c.weight_scale", "uint8", (8, 2), unit="c"),
        TensorSpec("c.weight_scale_inv", "float32", (1, 1)),
        TensorSpec("c.weight", "float8_e5m2", (8, 64)),
    ],
)
def test_quantized_tensor_that_was_not_asked_for_is_refused(tensor: TensorSpec) -> None:
    with pytest.raises(QuantizationError, match=rf"{tensor.name}: .*not asked for"):
        check_offer([*_good().values(), tensor], WANTED)


def test_kv_cache_scales_are_not_taken_for_weight_scales() -> None:
    scale = TensorSpec("model.layers.0.self_attn.k_scale", "float32", ())
    check_offer([*_good().values(), scale], WANTED)


def test_unquantized_offer_of_a_wanted_name_is_refused() -> None:
    offer = _good() | {"a.weight": TensorSpec("a.weight", "bfloat16", (8, 64), unit="a.weight")}
    with pytest.raises(QuantizationError, match=r"float8_e4m3fn \[8, 64\] was asked for, bfloat16"):
        check_offer(offer.values(), WANTED)


def test_flattened_scale_of_grouped_experts_is_refused() -> None:
    flat = TensorSpec("b.weight_scale", "uint8", (32, 2), unit="b.weight")
    with pytest.raises(
        QuantizationError, match=r"uint8 \[4, 8, 2\] was asked for, uint8 \[32, 2\]"
    ):
        check_offer((_good() | {flat.name: flat}).values(), WANTED)


@pytest.mark.parametrize("unit", ["", "b.weight"])
def test_value_and_scale_must_be_a_unit_of_their_own(unit: str) -> None:
    scale = TensorSpec("a.weight_scale", "uint8", (8, 2), unit=unit)
    with pytest.raises(QuantizationError, match=r"a\.weight: value and scale are not one unit"):
        check_offer((_good() | {scale.name: scale}).values(), WANTED)


def test_pair_without_a_unit_is_refused_even_where_nothing_else_is_offered() -> None:
    spec = WANTED[0]
    offer = [
        TensorSpec(spec.value_name, "float8_e4m3fn", spec.value_shape),
        TensorSpec(spec.scale_name, "uint8", spec.scale_shape),
    ]
    with pytest.raises(QuantizationError, match="not one unit of their own"):
        check_offer(offer, [spec])


def test_pairs_that_share_a_unit_are_refused() -> None:
    offer = {n: TensorSpec(t.name, t.dtype, t.shape, unit="all") for n, t in _good().items()}
    with pytest.raises(QuantizationError, match="not one unit of their own"):
        check_offer(offer.values(), WANTED)


def test_bucket_that_holds_half_a_pair_is_refused_by_name() -> None:
    check_buckets([{"a.weight", "a.weight_scale", "norm.weight"}], WANTED)
    with pytest.raises(QuantizationError, match=r"b\.weight, b\.weight_scale"):
        check_buckets([{"a.weight", "a.weight_scale", "b.weight"}, {"b.weight_scale"}], WANTED)
