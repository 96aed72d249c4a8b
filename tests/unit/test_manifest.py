"""Manifests: what a rank may claim, how regions are numbered, and how ranks are united."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from plan_cases import manifest, whole

from weight_sync.errors import LayoutError
from weight_sync.layout import Box, full_box
from weight_sync.manifest import Manifest, TensorSpec, build_catalogue, widen

W = TensorSpec("w", "bfloat16", (4, 6))
BIAS = TensorSpec("bias", "float32", (6,))
SCALAR = TensorSpec("scalar", "float32", ())
EMPTY = TensorSpec("empty", "float32", (0, 64))


def test_regions_come_back_in_order_whatever_their_rank() -> None:
    held = [(BIAS, [Box((2,), (4,))]), (W, [Box((0, 0), (1, 6)), Box((3, 0), (1, 6))])]
    made = manifest(0, [*held, *whole(SCALAR, EMPTY)])
    assert made.regions() == [
        (BIAS, Box((2,), (4,))),
        (W, Box((0, 0), (1, 6))),
        (W, Box((3, 0), (1, 6))),
        (SCALAR, Box((), ())),
        (EMPTY, Box((0, 0), (0, 64))),
    ]


def test_a_manifest_survives_the_wire() -> None:
    made = manifest(3, whole(W, SCALAR))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Manifest) == made


def test_an_empty_shard_is_no_region_but_the_tensor_is_known() -> None:
    made = manifest(0, [(W, [Box((4, 0), (0, 6))])])
    assert made.regions() == []
    assert made.tensors == (W,)


def test_a_manifest_without_tensors_is_valid() -> None:
    assert manifest(0, []).regions() == []


@pytest.mark.parametrize(
    "box", [Box((0, 1), (4, 6)), Box((-1, 0), (1, 6)), Box((0,), (4,)), Box((0, 0), (5, 6))]
)
def test_a_region_outside_its_tensor_is_refused(box: Box) -> None:
    with pytest.raises(LayoutError, match=r"rank 2: region .* does not lie in w"):
        manifest(2, [(W, [box])])


def test_a_name_that_comes_twice_is_refused() -> None:
    with pytest.raises(LayoutError, match="rank 1 names w twice"):
        manifest(1, whole(W, W))


def test_a_dtype_that_cannot_travel_is_refused() -> None:
    with pytest.raises(LayoutError, match="complex64"):
        TensorSpec("z", "complex64", (2,))


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(LayoutError, match="negative"):
        TensorSpec("w", "float32", (-1,))


def test_a_catalogue_is_sorted_whatever_the_order_of_ranks() -> None:
    a, b = manifest(0, whole(W)), manifest(1, whole(SCALAR, BIAS))
    assert [t.name for t in build_catalogue([a, b]).tensors] == ["bias", "scalar", "w"]
    assert build_catalogue([a, b]) == build_catalogue([b, a])


@pytest.mark.parametrize(
    "other",
    [
        TensorSpec("w", "float32", (4, 6)),
        TensorSpec("w", "bfloat16", (6, 4)),
        TensorSpec("w", "bfloat16", (4, 6), alias_of="bias"),
        TensorSpec("w", "bfloat16", (4, 6), unit="u"),
    ],
)
def test_ranks_that_describe_a_tensor_differently_are_refused(other: TensorSpec) -> None:
    with pytest.raises(LayoutError, match=r"w \(rank 0: .*, rank 1: .*\)"):
        build_catalogue([manifest(0, whole(W)), manifest(1, whole(other))])


def test_catalogue_shapes_are_padded_on_the_left() -> None:
    catalogue = build_catalogue([manifest(0, whole(W, BIAS, SCALAR))])
    assert catalogue.shapes().tolist() == [[1, 6], [1, 1], [4, 6]]
    assert catalogue.itemsizes().tolist() == [4, 4, 2]


def test_widening_pads_on_the_left() -> None:
    assert widen(np.array([[3, 4]], np.int64), 3, 1).tolist() == [[1, 3, 4]]


def test_full_boxes_of_scalars_fit() -> None:
    assert manifest(0, [(SCALAR, [full_box(())])]).regions() == [(SCALAR, Box((), ()))]
