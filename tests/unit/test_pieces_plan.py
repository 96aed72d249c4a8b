"""Pieces: what a worker needs, intersected with what trainer ranks own."""

from __future__ import annotations

import numpy as np
import pytest
from plan_cases import Slice, manifest, recording, whole

from weight_sync import pieces as pieces_module
from weight_sync.errors import LayoutError
from weight_sync.layout import Box, full_box
from weight_sync.manifest import Catalogue, Manifest, TensorSpec, build_catalogue
from weight_sync.pieces import Pieces, intersect
from weight_sync.regions import unite

W = TensorSpec("w", "bfloat16", (8, 4))
BIAS = TensorSpec("bias", "float32", (4,))
SCALAR = TensorSpec("scalar", "float32", ())


def pieces(manifests: list[Manifest], slices: list[Slice]) -> tuple[Pieces, Catalogue]:
    catalogue = build_catalogue(manifests)
    return intersect(catalogue, unite(catalogue, manifests), recording(slices)), catalogue


def sharded(spec: TensorSpec, ranks: int) -> list[Manifest]:
    rows = spec.shape[0] // ranks
    rest = spec.shape[1:]
    return [
        manifest(r, [(spec, [Box((r * rows, *(0,) * len(rest)), (rows, *rest))])])
        for r in range(ranks)
    ]


def test_a_slice_is_cut_where_owners_change() -> None:
    found, _ = pieces(sharded(W, 4), [Slice(W, Box((1, 1), (4, 2)))])
    assert found.offset.tolist() == [[1, 1], [2, 1], [4, 1]]
    assert found.size.tolist() == [[1, 2], [2, 2], [1, 2]]
    assert found.nbytes.tolist() == [4, 8, 4]


def test_pieces_follow_the_order_of_slices() -> None:
    slices = [Slice(W, Box((6, 0), (2, 4))), Slice(W, Box((0, 0), (4, 4)))]
    found, _ = pieces(sharded(W, 4), slices)
    assert found.slice.tolist() == [0, 1, 1]


def test_tensors_cut_along_two_dimensions_are_found() -> None:
    quarters = [Box((r, c), (4, 2)) for r in (0, 4) for c in (0, 2)]
    manifests = [manifest(i, [(W, [box])]) for i, box in enumerate(quarters)]
    found, _ = pieces(manifests, [Slice(W, Box((3, 1), (2, 2)))])
    assert sorted(map(tuple, found.offset.tolist())) == [(3, 1), (3, 2), (4, 1), (4, 2)]


def test_tensors_of_different_rank_keep_their_sizes() -> None:
    manifests = [manifest(0, whole(W, BIAS, SCALAR))]
    slices = [Slice(SCALAR, full_box(())), Slice(BIAS, Box((1,), (2,)))]
    found, catalogue = pieces(manifests, slices)
    assert [catalogue.tensors[t].name for t in found.tensor] == ["scalar", "bias"]
    assert found.nbytes.tolist() == [4, 8]


def test_a_slice_that_nobody_owns_entirely_is_refused_by_name() -> None:
    manifests = sharded(W, 4)
    catalogue = build_catalogue(manifests)
    beyond = recording([Slice(W, Box((6, 0), (4, 4)))])
    with pytest.raises(LayoutError, match=r"1 tensors are not fully owned .* w"):
        intersect(catalogue, unite(catalogue, manifests), beyond)


def test_large_replicated_regions_are_cut_so_that_owners_can_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces_module, "SPLIT_BYTES", 16)
    found, _ = pieces([manifest(r, whole(W)) for r in range(2)], [Slice(W, full_box((8, 4)))])
    assert found.nbytes.tolist() == [16, 16, 16, 16]
    assert found.offset[:, 0].tolist() == [0, 2, 4, 6]


def test_regions_of_one_owner_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces_module, "SPLIT_BYTES", 16)
    found, _ = pieces([manifest(0, whole(W))], [Slice(W, full_box((8, 4)))])
    assert found.nbytes.tolist() == [64]


def test_a_recording_without_slices_has_no_pieces() -> None:
    found, _ = pieces(sharded(W, 2), [])
    assert len(found) == 0
    assert found.nbytes.dtype == np.int64
