"""Packing of buckets on a trainer rank: places, casts, and new copies only when memory moved."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.harness.sources import BoxSource, Held, whole
from weight_sync.layout import Box
from weight_sync.trainer.export import collect
from weight_sync.trainer.packer import Bucketed, Packer

CPU = torch.device("cpu")


def packer(source: BoxSource, pieces: list[tuple[int, Box, int, int]], nbytes: int) -> Packer:
    """Pieces as (region, box, bucket, byte offset)."""
    manifest = source.manifest(0, "host", "cpu")
    bucketed = Bucketed(
        region=np.array([p[0] for p in pieces], np.int64),
        offset=np.array([p[1].offset for p in pieces], np.int64),
        size=np.array([p[1].size for p in pieces], np.int64),
        bucket=np.array([p[2] for p in pieces], np.int64),
        start=np.array([p[3] for p in pieces], np.int64),
        nbytes=nbytes,
    )
    return Packer(manifest, bucketed, CPU)


def test_boxes_are_packed_densely_at_their_places() -> None:
    tensor = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    source = BoxSource({"w": whole(tensor)})
    pieces = [(0, Box((1, 2), (2, 3)), 0, 0), (0, Box((0, 0), (4, 1)), 0, 256)]
    made = packer(source, pieces, 512)
    made.prepare(collect(source.regions), 1)
    slot = made.pack(0)
    assert slot[:24].view(torch.float32).tolist() == tensor[1:3, 2:5].flatten().tolist()
    assert slot[256:272].view(torch.float32).tolist() == tensor[:, 0].tolist()


def test_strided_regions_are_packed_by_their_logical_places() -> None:
    tensor = torch.arange(12, dtype=torch.float32).reshape(3, 4).T
    source = BoxSource({"w": whole(tensor)})
    made = packer(source, [(0, Box((0, 0), (4, 3)), 0, 0)], 256)
    made.prepare(collect(source.regions), 1)
    assert made.pack(0)[:48].view(torch.float32).tolist() == tensor.flatten().tolist()


def test_values_are_cast_as_they_are_packed() -> None:
    tensor = torch.randn(8, 8)
    source = BoxSource({"w": Held((8, 8), "bfloat16", whole(tensor).parts)})
    made = packer(source, [(0, Box((0, 0), (8, 8)), 0, 0)], 256)
    made.prepare(collect(source.regions), 1)
    packed = made.pack(0)[:128].view(torch.bfloat16).reshape(8, 8)
    assert torch.equal(packed, tensor.to(torch.bfloat16))


def test_neighbouring_buckets_use_different_buffers() -> None:
    source = BoxSource({"w": whole(torch.zeros(4, 4))})
    pieces = [(0, Box((i, 0), (1, 4)), i, 0) for i in range(4)]
    made = packer(source, pieces, 256)
    made.prepare(collect(source.regions), 1)
    places = [made.pack(i).data_ptr() for i in range(4)]
    assert places[0] == places[2] != places[1] == places[3]


def test_weights_that_moved_are_read_from_their_new_place() -> None:
    source = BoxSource({"w": whole(torch.zeros(4, 4))})
    made = packer(source, [(0, Box((0, 0), (4, 4)), 0, 0)], 256)
    made.prepare(collect(source.regions), 1)
    source.regions[0] = torch.ones(4, 4)
    made.prepare(collect(source.regions), 2)
    assert made.pack(0)[:64].view(torch.float32).unique().tolist() == [1.0]


def test_forgetting_drops_every_reference_to_weights() -> None:
    import weakref

    source = BoxSource({"w": whole(torch.zeros(4, 4))})
    made = packer(source, [(0, Box((0, 0), (4, 4)), 0, 0)], 256)
    regions = collect(source.regions)
    made.prepare(regions, 1)
    storage = weakref.ref(regions.storages[0])
    del regions
    assert storage() is not None
    made.forget()
    assert storage() is None
    with pytest.raises(KeyError):
        made.pack(0)
