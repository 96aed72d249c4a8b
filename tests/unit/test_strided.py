"""Views of row-major tensors become boxes again, whatever chain of views made them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.errors import LayoutError
from weight_sync.strided import StridedView, map_view

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


def view_of(tensor: torch.Tensor) -> StridedView:
    return StridedView(tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()))


@st.composite
def chains(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """A random chain of what loaders do: narrow, step, transpose, reshape, chunk, index."""
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["narrow", "step", "transpose", "view", "chunk", "index"]))
        dim = draw(st.integers(0, tensor.ndim - 1)) if tensor.ndim else 0
        if kind == "transpose" and tensor.ndim > 1:
            tensor = tensor.transpose(dim, draw(st.integers(0, tensor.ndim - 1)))
        elif kind == "view" and tensor.numel():
            size = [tensor.numel()]
            for _ in range(draw(st.integers(0, 2))):
                divisors = [n for n in range(1, size[-1] + 1) if size[-1] % n == 0]
                first = draw(st.sampled_from(divisors))
                size[-1:] = [first, size[-1] // first]
            try:
                tensor = tensor.view(size)
            except RuntimeError:  # This view would need a copy, which loaders do themselves.
                continue
        elif tensor.ndim and tensor.shape[dim]:
            length = tensor.shape[dim]
            if kind == "narrow":
                start = draw(st.integers(0, length - 1))
                tensor = tensor.narrow(dim, start, draw(st.integers(1, length - start)))
            elif kind == "step":
                index = [slice(None)] * tensor.ndim
                index[dim] = slice(None, None, draw(st.integers(1, 3)))
                tensor = tensor[tuple(index)]
            elif kind == "chunk":
                tensor = draw(st.sampled_from(tensor.chunk(2, dim)))
            elif kind == "index":
                tensor = tensor.select(dim, draw(st.integers(0, length - 1)))
    return tensor


def replay(shape: tuple[int, ...], src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """Copies through the mapped boxes; counts how often each element is written."""
    source = torch.arange(math.prod(shape)).reshape(shape)
    flat = torch.full((dst.untyped_storage().nbytes() // dst.itemsize,), -1)
    for mapped in map_view(shape, view_of(src), view_of(dst)):
        part = source
        for dim, (o, n) in enumerate(zip(mapped.box.offset, mapped.box.size, strict=True)):
            part = part.narrow(dim, o, n)
        place = flat.as_strided(part.shape, mapped.dst_stride, mapped.dst_offset)
        assert (place == -1).all(), "an element was written twice"
        place.copy_(part)
    return flat


@settings(max_examples=400, deadline=None)
@given(shape=shapes, data=st.data())
def test_mapped_boxes_copy_what_the_views_copy(shape: tuple[int, ...], data: st.DataObject) -> None:
    source = torch.arange(math.prod(shape)).reshape(shape)
    src = data.draw(chains(source))
    order = data.draw(st.permutations(range(src.ndim)))
    padded = torch.full([src.shape[d] + 1 for d in order], -1).permute(
        [order.index(d) for d in range(src.ndim)]
    )
    dst = padded
    for dim in range(src.ndim):
        dst = dst.narrow(dim, 1, src.shape[dim])
    expected = torch.full((padded.numel(),), -1)
    expected.as_strided(dst.shape, dst.stride(), dst.storage_offset()).copy_(src)
    assert torch.equal(replay(shape, src, dst), expected)


def test_a_scalar_maps_to_one_element() -> None:
    (mapped,) = map_view((), StridedView(0, (), ()), StridedView(5, (), ()))
    assert (mapped.box.elements, mapped.dst_offset) == (1, 5)


def test_an_empty_view_maps_to_nothing() -> None:
    empty = StridedView(0, (0, 4), (4, 1))
    assert map_view((4, 4), empty, empty) == []


def test_a_whole_tensor_is_one_box() -> None:
    view = view_of(torch.empty(4, 6))
    (mapped,) = map_view((4, 6), view, view)
    assert (mapped.box.size, mapped.dst_stride) == ((4, 6), (6, 1))


def test_rows_of_a_flattened_tensor_are_one_box() -> None:
    src = torch.empty(8, 6).view(-1)[12:36]
    (mapped,) = map_view((8, 6), view_of(src), StridedView(0, (24,), (1,)))
    assert (mapped.box.offset, mapped.box.size) == ((2, 0), (4, 6))


def test_a_view_outside_the_tensor_is_refused() -> None:
    with pytest.raises(LayoutError, match="outside"):
        map_view((4,), StridedView(2, (4,), (1,)), StridedView(0, (4,), (1,)))


def test_an_expanded_view_is_refused() -> None:
    with pytest.raises(LayoutError, match="repeats"):
        map_view((4,), StridedView(0, (3, 4), (0, 1)), StridedView(0, (3, 4), (4, 1)))


def test_overlapping_windows_are_refused() -> None:
    windows = view_of(torch.arange(6).unfold(0, 3, 1))
    with pytest.raises(LayoutError, match="repeats"):
        map_view((6,), windows, StridedView(0, (4, 3), (3, 1)))


def test_views_of_different_size_are_refused() -> None:
    with pytest.raises(LayoutError, match="differ in size"):
        map_view((4,), StridedView(0, (4,), (1,)), StridedView(0, (3,), (1,)))


def test_a_view_too_irregular_to_plan_is_refused() -> None:
    every_other = StridedView(0, (70_000,), (2,))
    with pytest.raises(LayoutError, match="too irregular"):
        map_view((140_000,), every_other, StridedView(0, (70_000,), (1,)))
