"""Descriptions of the usual Megatron layers: which view of a local tensor is which region.

All shapes are those of the checkpoint, ``[out, in]`` for linears; ``hidden`` is the width of the
residual stream. ``axis`` is the parallel axis that cuts the layer: the grid's ``tp``, or ``etp``
for experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weight_sync.errors import LayoutError
from weight_sync.layout import Box, full_box
from weight_sync.sources.megatron import MegatronEntry, MegatronRegion
from weight_sync.sources.megatron_grid import WHOLE, Axis


def replicated(
    tensor: torch.Tensor, name: str, shape: Sequence[int], *, alias_of: str = ""
) -> MegatronEntry:
    """A tensor that every rank holds whole: norms, routers, row-parallel biases."""
    box = full_box(shape)
    region = MegatronRegion(name, box.size, box, box, alias_of=alias_of)
    return MegatronEntry(name, tensor, box.size, None, WHOLE, (region,))


def split(
    tensor: torch.Tensor,
    name: str,
    shape: Sequence[int],
    dim: int | None,
    axis: Axis,
    *,
    transposed: bool = False,
) -> MegatronEntry:
    """A tensor cut evenly along one dimension of the checkpoint tensor.

    Args:
        tensor: The local part.
        name: Checkpoint name.
        shape: Checkpoint shape.
        dim: 0 for column-parallel linears and their biases, 1 for row-parallel ones, None if every
            rank holds all of it.
        axis: Parallel axis.
        transposed: The trainer stores ``[in, out]``.
    """
    whole = tuple(shape)
    stored = _swapped(whole) if transposed else whole
    if transposed and dim is not None:
        # The last two dimensions trade places; those before them stay.
        dim = {len(whole) - 1: len(whole) - 2, len(whole) - 2: len(whole) - 1}.get(dim, dim)
    held = MegatronEntry(name, tensor, stored, dim, axis, ()).local_box()
    box = Box(_swapped(held.offset), _swapped(held.size)) if transposed else held
    region = MegatronRegion(name, whole, box, full_box(held.size), transposed)
    return MegatronEntry(name, tensor, stored, dim, axis, (region,))


def vocabulary(
    tensor: torch.Tensor,
    name: str,
    shape: Sequence[int],
    padded: int,
    axis: Axis,
    *,
    alias_of: str = "",
) -> MegatronEntry:
    """An embedding or output layer whose rows Megatron padded to ``padded``; padding is never sent.

    Args:
        tensor: The local rows, ``[padded / tp, hidden]``.
        name: Checkpoint name.
        shape: ``(vocabulary, hidden)`` of the checkpoint.
        padded: Rows of Megatron's own tensor over all ranks.
        axis: Tensor parallel axis.
        alias_of: Checkpoint name this one is tied to.
    """
    if padded < shape[0]:
        raise LayoutError(f"{name} has {shape[0]} rows, more than the {padded} after padding")
    whole = (padded, *shape[1:])
    held = MegatronEntry(name, tensor, whole, 0, axis, ()).local_box()
    real = held.intersect(full_box(shape))
    regions: tuple[MegatronRegion, ...] = ()
    if real is not None:
        local = full_box(real.size)
        regions = (MegatronRegion(name, tuple(shape), real, local, alias_of=alias_of),)
    return MegatronEntry(name, tensor, whole, 0, axis, regions)


def fused_qkv(
    tensor: torch.Tensor,
    name: str,
    names: tuple[str, str, str],
    heads: int,
    kv_heads: int,
    head_dim: int,
    rest: Sequence[int],
    axis: Axis,
) -> MegatronEntry:
    """Query, key and value in one tensor, interleaved per query group: its queries, key, value.

    Args:
        tensor: The local query groups.
        name: Name in the Megatron model.
        names: Checkpoint names of query, key and value.
        heads: Query heads of the model.
        kv_heads: Query groups of the model.
        head_dim: Rows per head.
        rest: ``(hidden,)`` for the weight, ``()`` for the bias.
        axis: Tensor parallel axis.

    Raises:
        LayoutError: If groups do not divide over the axis.
    """
    if heads % kv_heads or kv_heads % axis.size:
        raise LayoutError(
            f"{name}: {heads} heads in {kv_heads} groups do not divide over {axis.size} ranks"
        )
    queries = heads // kv_heads * head_dim
    stride = queries + 2 * head_dim
    local_groups = kv_heads // axis.size
    regions = []
    for i in range(local_groups):
        group, start = axis.rank * local_groups + i, i * stride
        for part, rows in zip(names, (queries, head_dim, head_dim), strict=True):
            shape = ((heads if part == names[0] else kv_heads) * head_dim, *rest)
            regions.append(
                MegatronRegion(
                    part, shape, _rows(shape, group * rows, rows), _rows(shape, start, rows)
                )
            )
            start += rows
    return MegatronEntry(name, tensor, (kv_heads * stride, *rest), 0, axis, tuple(regions))


def fused_gate_up(
    tensor: torch.Tensor,
    name: str,
    names: tuple[str, str],
    shape: Sequence[int],
    axis: Axis,
) -> MegatronEntry:
    """Gate and up projection in one tensor: on each rank its gate rows, then its up rows.

    Args:
        tensor: The local rows, ``[2 * inter / tp, ...]``.
        name: Name in the Megatron model.
        names: Checkpoint names of gate and up.
        shape: Checkpoint shape of each: ``(inter, hidden)``, or ``(inter,)`` for the bias.
        axis: Parallel axis.
    """
    whole = tuple(shape)
    entry = MegatronEntry(name, tensor, (2 * whole[0], *whole[1:]), 0, axis, ())
    rows = entry.local_box().size[0] // 2
    if rows * axis.size != whole[0]:
        raise LayoutError(f"{name}: {whole[0]} gate rows do not divide over {axis.size} ranks")
    regions = tuple(
        MegatronRegion(part, whole, _rows(whole, axis.rank * rows, rows), _rows(whole, at, rows))
        for part, at in zip(names, (0, rows), strict=True)
    )
    return MegatronEntry(name, tensor, entry.shape, 0, axis, regions)


def _swapped(values: tuple[int, ...]) -> tuple[int, ...]:
    return (*values[:-2], values[-1], values[-2])


def _rows(shape: Sequence[int], start: int, count: int) -> Box:
    return Box((start, *(0,) * (len(shape) - 1)), (count, *shape[1:]))
