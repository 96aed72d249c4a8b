"""Boxes and the rules by which device meshes cut tensors, against torch.chunk itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.errors import LayoutError
from weight_sync.layout import (
    Box,
    Replicate,
    Shard,
    StridedShard,
    chunk_range,
    contiguous_strides,
    full_box,
    shard_box,
)

sizes = st.integers(1, 4)


def cells(box: Box) -> set[tuple[int, ...]]:
    ranges = [range(o, o + n) for o, n in zip(box.offset, box.size, strict=True)]
    return {tuple(i) for i in torch.cartesian_prod(*map(torch.tensor, ranges)).tolist()}


def chunk(tensor: torch.Tensor, parts: int, index: int, dim: int) -> torch.Tensor:
    """torch.chunk, with the empty chunks that it leaves out."""
    chunks = tensor.chunk(parts, dim)
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def select(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, (offset, size) in enumerate(zip(box.offset, box.size, strict=True)):
        tensor = tensor.narrow(dim, offset, size)
    return tensor


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    offset = draw(st.tuples(*[st.integers(0, 4)] * 2))
    size = draw(st.tuples(*[st.integers(1, 5)] * 2))
    return Box(offset, size)


@given(st.integers(0, 40), st.integers(1, 9))
def test_chunks_are_those_of_torch(length: int, parts: int) -> None:
    for index in range(parts):
        expected = chunk(torch.arange(length), parts, index, 0)
        start, count = chunk_range(length, parts, index)
        assert torch.arange(length)[start : start + count].tolist() == expected.tolist()


@given(
    shape=st.tuples(st.integers(1, 13), st.integers(1, 9)),
    mesh=st.lists(sizes, min_size=1, max_size=3),
    data=st.data(),
)
def test_plain_shards_cut_from_the_outer_mesh_dimension_inwards(
    shape: tuple[int, ...], mesh: list[int], data: st.DataObject
) -> None:
    dims = data.draw(st.lists(st.sampled_from([None, 0, 1, -1]), min_size=3, max_size=3))
    coordinate = [data.draw(st.integers(0, n - 1)) for n in mesh]
    placements = [Replicate() if d is None else Shard(d) for d in dims[: len(mesh)]]
    expected = numbered(shape)
    for parts, dim, index in zip(mesh, dims, coordinate, strict=False):
        expected = expected if dim is None else chunk(expected, parts, index, dim)
    box = shard_box(shape, mesh, placements, coordinate)
    assert torch.equal(select(numbered(shape), box), expected)


@given(
    rows=st.integers(1, 19), replicas=sizes, outer=sizes, inner=st.integers(2, 4), data=st.data()
)
def test_strided_shards_cut_what_inner_mesh_dimensions_left(
    rows: int, replicas: int, outer: int, inner: int, data: st.DataObject
) -> None:
    r, o, i = (data.draw(st.integers(0, n - 1)) for n in (replicas, outer, inner))
    placements = (Replicate(), StridedShard(0, split_factor=inner), Shard(0))
    expected = chunk(chunk(torch.arange(rows), inner, i, 0), outer, o, 0)
    box = shard_box((rows,), (replicas, outer, inner), placements, (r, o, i))
    assert select(torch.arange(rows), box).tolist() == expected.tolist()


def test_nested_strided_shards_cut_from_the_inside_out() -> None:
    placements = (StridedShard(0, 6), StridedShard(0, 3), Shard(0))
    for a in range(2):
        for b in range(2):
            for c in range(3):
                local = chunk(chunk(chunk(torch.arange(31), 3, c, 0), 2, b, 0), 2, a, 0)
                box = shard_box((31,), (2, 2, 3), placements, (a, b, c))
                assert select(torch.arange(31), box).tolist() == local.tolist()


@pytest.mark.parametrize("rows", [4, 5, 7])
def test_fsdp_over_tensor_parallel_rows_come_in_order(rows: int) -> None:
    found = []
    for tp in range(2):
        for dp in range(2):
            box = shard_box((rows,), (2, 2), (StridedShard(0, 2), Shard(0)), (dp, tp))
            found += range(box.offset[0], box.offset[0] + box.size[0])
    assert found == list(range(rows))


@pytest.mark.parametrize("factor", [1, 4])
def test_a_strided_shard_that_interleaves_is_refused(factor: int) -> None:
    with pytest.raises(LayoutError, match="interleaves"):
        shard_box((8,), (2, 2), (StridedShard(0, factor), Shard(0)), (0, 0))


def test_a_strided_shard_to_the_right_of_its_shard_is_refused() -> None:
    with pytest.raises(LayoutError, match="interleaves"):
        shard_box((8,), (2, 2), (Shard(0), StridedShard(0, 2)), (0, 0))


def test_a_placement_beyond_the_shape_is_refused() -> None:
    with pytest.raises(LayoutError, match="does not fit"):
        shard_box((8,), (2,), (Shard(1),), (0,))


def test_arguments_of_different_length_are_refused() -> None:
    with pytest.raises(LayoutError, match="one entry per mesh dimension"):
        shard_box((8,), (2, 2), (Shard(0),), (0, 0))


@pytest.mark.parametrize(("parts", "index"), [(0, 0), (2, 2), (2, -1)])
def test_chunks_that_do_not_exist_are_refused(parts: int, index: int) -> None:
    with pytest.raises(LayoutError, match="does not exist"):
        chunk_range(8, parts, index)


@given(boxes(), boxes())
def test_intersection_is_what_both_have(a: Box, b: Box) -> None:
    common = a.intersect(b)
    assert (cells(common) if common else set()) == cells(a) & cells(b)


@given(boxes(), boxes())
def test_subtraction_leaves_disjoint_boxes_of_the_rest(a: Box, b: Box) -> None:
    left = a.subtract(b)
    assert sum(part.elements for part in left) == len(cells(a) - cells(b))
    assert set().union(*map(cells, left)) == cells(a) - cells(b)


def test_a_scalar_is_one_element() -> None:
    assert full_box(()) == Box((), ())
    assert full_box(()).elements == 1


def test_a_scalar_intersects_itself() -> None:
    assert full_box(()).intersect(full_box(())) == Box((), ())


@given(st.lists(st.integers(1, 5), max_size=4))
def test_strides_are_row_major(shape: list[int]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()
