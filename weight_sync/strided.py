"""Turns a strided view of a row-major tensor back into boxes of that tensor.

Engine loaders narrow, chunk, reshape and transpose a checkpoint tensor before they copy from it.
What is left of all that is a storage offset, sizes and strides; here these become regions again,
each with the stride that the destination has per global dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from weight_sync.errors import LayoutError
from weight_sync.layout import Box, contiguous_strides

# A view that no box arithmetic can express is unrolled; beyond this it is not worth a plan.
_UNROLL_LIMIT = 1 << 16


@dataclass(frozen=True)
class StridedView:
    """A view: offset and strides in elements of its storage."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class MappedBox:
    """A region of the source tensor and where it goes.

    Attributes:
        box: Region in the global source tensor.
        dst_offset: Element offset of its first element in the destination storage.
        dst_stride: Elements between neighbours in the destination, per global dimension.
    """

    box: Box
    dst_offset: int
    dst_stride: tuple[int, ...]


@dataclass(frozen=True)
class _Dim:
    size: int
    src: int
    dst: int


def map_view(shape: Sequence[int], src: StridedView, dst: StridedView) -> list[MappedBox]:
    """Maps a copy ``dst <- src`` to regions of the global tensor ``src`` is a view of.

    Args:
        shape: Shape of the global row-major tensor.
        src: View of it, as torch reports it.
        dst: View of the destination with the same sizes.

    Returns:
        Disjoint regions that together are the view.

    Raises:
        LayoutError: If the view reads outside the tensor, repeats elements, or is too irregular.
    """
    if src.size != dst.size:
        raise LayoutError(f"source view {src.size} and destination view {dst.size} differ in size")
    if prod(src.size) == 0:
        return []
    dims = [
        _Dim(n, s, t) for n, s, t in zip(src.size, src.stride, dst.stride, strict=True) if n != 1
    ]
    dims.sort(key=lambda d: -d.src)
    reach = 0
    for dim in reversed(dims):
        # Narrow, step, transpose and reshape never make a stride shorter than what lies inside.
        if dim.src <= reach:
            raise LayoutError(f"a view of a tensor of shape {tuple(shape)} repeats its elements")
        reach += (dim.size - 1) * dim.src
    return list(_resolve(tuple(shape), _merge(dims), src.offset, dst.offset))


def _merge(dims: list[_Dim]) -> list[_Dim]:
    merged: list[_Dim] = []
    for dim in dims:
        if merged and merged[-1].src == dim.src * dim.size and merged[-1].dst == dim.dst * dim.size:
            merged[-1] = _Dim(merged[-1].size * dim.size, dim.src, dim.dst)
        else:
            merged.append(dim)
    return merged


def _resolve(
    shape: tuple[int, ...], dims: list[_Dim], src_offset: int, dst_offset: int
) -> Iterator[MappedBox]:
    strides = contiguous_strides(shape)
    start = [src_offset // s % max(n, 1) for s, n in zip(strides, shape, strict=True)]
    if src_offset < 0 or src_offset >= max(prod(shape), 1):
        raise LayoutError(f"a view reads outside a tensor of shape {shape}")
    size = [1] * len(shape)
    dst_stride = [0] * len(shape)
    for at, dim in enumerate(dims):
        axis = next(
            (a for a in range(len(shape)) if strides[a] <= dim.src and shape[a] > 1),
            None,
        )
        if axis is None:
            raise LayoutError(f"a view has a stride that does not fit a tensor of shape {shape}")
        rest = dims[:at] + dims[at + 1 :]
        step, odd = divmod(dim.src, strides[axis])
        if odd == 0 and step == 1 and size[axis] == 1:
            if start[axis] + dim.size <= shape[axis]:
                size[axis], dst_stride[axis] = dim.size, dim.dst
                continue
            inner = shape[axis]
            if start[axis] == 0 and dim.size % inner == 0:
                # The dimension runs over several axes: split it at this axis.
                outer = _Dim(dim.size // inner, dim.src * inner, dim.dst * inner)
                parts = sorted([*rest, outer, _Dim(inner, dim.src, dim.dst)], key=lambda d: -d.src)
                yield from _resolve(shape, parts, src_offset, dst_offset)
                return
        if dim.size > _UNROLL_LIMIT:
            raise LayoutError(
                f"a view of a tensor of shape {shape} is too irregular to plan "
                f"({dim.size} separate parts)"
            )
        for i in range(dim.size):
            yield from _resolve(shape, rest, src_offset + i * dim.src, dst_offset + i * dim.dst)
        return
    yield MappedBox(Box(tuple(start), tuple(size)), dst_offset, tuple(dst_stride))
