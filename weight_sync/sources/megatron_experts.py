"""Descriptions of Megatron's expert layers.

A rank of the expert parallel axis holds consecutive experts. Their tensors come as a list of 2-D
parameters or as one 3-D parameter, and checkpoints name each expert or stack all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from weight_sync.errors import LayoutError
from weight_sync.layout import Box
from weight_sync.sources.megatron import MegatronEntry, MegatronRegion
from weight_sync.sources.megatron_grid import ParallelGrid
from weight_sync.sources.megatron_layers import fused_gate_up, split

Experts = torch.Tensor | Sequence[torch.Tensor]


@dataclass(frozen=True)
class Stacked:
    """A checkpoint tensor of all experts, ``[experts, out, in]``.

    Attributes:
        name: Checkpoint name.
        transposed: The checkpoint stores ``[experts, in, out]``.
        interleaved: Gate and up rows alternate; otherwise all gate rows come first. Alternating
            rows are one region each, so a rank's program grows with its rows.
    """

    name: str
    transposed: bool = False
    interleaved: bool = False


def expert_gate_up(
    tensors: Experts,
    name: str,
    target: Callable[[int], tuple[str, str]] | Stacked,
    shape: Sequence[int],
    experts: int,
    grid: ParallelGrid,
) -> list[MegatronEntry]:
    """First linears of experts (fc1): gate rows, then up rows, on each expert tensor parallel rank.

    Args:
        tensors: Local experts, each ``[2 * inter / etp, hidden]``, or biases without ``hidden``.
        name: Name in the Megatron model.
        target: Checkpoint names of gate and up by global expert number, or one stacked tensor.
        shape: Checkpoint shape of gate: ``(inter, hidden)``, or ``(inter,)``.
        experts: Number of experts of the model.
        grid: This rank's place.

    Raises:
        LayoutError: If experts or rows do not divide over their axes.
    """

    def one(tensor: torch.Tensor, label: str, expert: int) -> MegatronEntry:
        names = ("gate", "up") if isinstance(target, Stacked) else target(expert)
        return fused_gate_up(tensor, label, names, shape, grid.etp)

    return _entries(tensors, name, experts, grid, one, target)


def expert_split(
    tensors: Experts,
    name: str,
    target: Callable[[int], str] | Stacked,
    shape: Sequence[int],
    dim: int | None,
    experts: int,
    grid: ParallelGrid,
) -> list[MegatronEntry]:
    """Linears of experts that are cut along one dimension: second linears (fc2) along 1.

    Args:
        tensors: Local experts.
        name: Name in the Megatron model.
        target: Checkpoint name by global expert number, or one stacked tensor.
        shape: Checkpoint shape of one expert, ``(hidden, inter)`` for fc2.
        dim: Dimension that expert tensor parallelism cuts; None for biases that every rank holds.
        experts: Number of experts of the model.
        grid: This rank's place.

    Raises:
        LayoutError: If experts or the dimension do not divide over their axes.
    """

    def one(tensor: torch.Tensor, label: str, expert: int) -> MegatronEntry:
        part = "expert" if isinstance(target, Stacked) else target(expert)
        return replace(split(tensor, part, shape, dim, grid.etp), name=label)

    return _entries(tensors, name, experts, grid, one, target)


def _entries(
    tensors: Experts,
    name: str,
    experts: int,
    grid: ParallelGrid,
    one: Callable[[torch.Tensor, str, int], MegatronEntry],
    target: object,
) -> list[MegatronEntry]:
    if len(tensors) * grid.ep.size != experts:
        raise LayoutError(
            f"{name} has {len(tensors)} local experts on {grid.describe()}, expected "
            f"{experts / grid.ep.size:g} of {experts}; check its ep size"
        )
    first = grid.ep.rank * len(tensors)
    grouped = isinstance(tensors, torch.Tensor)
    out = []
    for i in range(len(tensors)):
        # A grouped tensor is described whole below; its experts are only looked at one by one.
        entry = one(tensors[i], name if grouped else f"{name}{i}", first + i)
        regions = entry.regions
        if isinstance(target, Stacked):
            regions = tuple(_stack(regions, target, first + i, experts))
        if grouped:
            regions = tuple(replace(r, local=_lead(r.local, i)) for r in regions)
        out.append(replace(entry, regions=regions))
    if not isinstance(tensors, torch.Tensor):
        return out
    whole = (len(tensors), *out[0].shape)
    dim = None if out[0].dim is None else out[0].dim + 1
    everything = tuple(region for entry in out for region in entry.regions)
    return [MegatronEntry(name, tensors, whole, dim, out[0].axis, everything)]


def _stack(
    regions: Sequence[MegatronRegion], target: Stacked, expert: int, experts: int
) -> Iterator[MegatronRegion]:
    """The same regions of one expert in a checkpoint tensor of all experts."""
    parts = list(dict.fromkeys(r.name for r in regions))
    for region in regions:
        part, rows = parts.index(region.name), region.shape[0]
        shape = (rows * len(parts), *region.shape[1:])
        start, count = region.box.offset[0], region.box.size[0]
        if target.interleaved and len(parts) > 1:
            runs = [(k, 1, (start + k) * len(parts) + part) for k in range(count)]
        else:
            runs = [(0, count, part * rows + start)]
        for skip, length, to in runs:
            box = _with_rows(region.box, to, length)
            local = _with_rows(region.local, region.local.offset[0] + skip, length)
            swap = target.transposed and len(shape) > 1
            if swap:
                box = Box(box.offset[::-1], box.size[::-1])
            yield MegatronRegion(
                target.name,
                (experts, *(shape[::-1] if swap else shape)),
                _lead(box, expert),
                local,
                swap,
            )


def _with_rows(box: Box, start: int, count: int) -> Box:
    return Box((start, *box.offset[1:]), (count, *box.size[1:]))


def _lead(box: Box, index: int) -> Box:
    return Box((index, *box.offset), (1, *box.size))
