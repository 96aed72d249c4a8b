"""Intersects what a worker needs with what trainer ranks own: the pieces of a plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import LayoutError, shorten
from weight_sync.manifest import Catalogue, widen
from weight_sync.recording import Recording
from weight_sync.regions import Regions

I64 = NDArray[np.int64]

# A replicated region is cut at this size so that its owners can share the work.
SPLIT_BYTES = 32 << 20


@dataclass(frozen=True)
class Pieces:
    """Pieces of one recording, sorted by slice.

    Attributes:
        slice: int64 ``[n]``, index of the recorded slice.
        region: int64 ``[n]``, index of the distinct trainer region.
        tensor: int64 ``[n]``, catalogue index.
        slot: int64 ``[n]``, digest slot of the recording.
        offset: int64 ``[n, R]``, global offset.
        size: int64 ``[n, R]``.
        nbytes: int64 ``[n]``.
    """

    slice: I64
    region: I64
    tensor: I64
    slot: I64
    offset: I64
    size: I64
    nbytes: I64

    def __len__(self) -> int:
        return len(self.slice)


def _candidates(regions: Regions, tensor: I64, offset: I64, size: I64) -> tuple[I64, I64]:
    """Pairs (slice, region) that may intersect."""
    first, last = regions.first[tensor].copy(), regions.first[tensor + 1].copy()
    dim = regions.cut_dim[tensor]
    rows = np.flatnonzero((dim >= 0) & (last - first > 1))
    if len(rows):
        # Cut along one dimension only: regions are sorted along it, so search instead of scan.
        everywhere = np.arange(len(regions.tensor))
        cut = np.maximum(regions.cut_dim[regions.tensor], 0)
        start = regions.offset[everywhere, cut]
        end = start + regions.size[everywhere, cut]
        span = int(max(end.max(), (offset + size).max())) + 1
        low = offset[rows, dim[rows]]
        high = low + size[rows, dim[rows]]
        base = tensor[rows] * span
        many = regions.cut_dim[regions.tensor] >= 0
        # Unsearchable tensors keep their place in the sorted keys but are never looked up.
        key_end = regions.tensor * span + np.where(many, end, 0)
        key_start = regions.tensor * span + np.where(many, start, 0)
        first[rows] = np.searchsorted(key_end, base + low, side="right")
        last[rows] = np.searchsorted(key_start, base + high, side="left")
    count = np.maximum(last - first, 0)
    slices = np.repeat(np.arange(len(tensor), dtype=np.int64), count)
    step = np.arange(len(slices), dtype=np.int64) - (np.cumsum(count) - count)[slices]
    return slices, first[slices] + step


def intersect(catalogue: Catalogue, regions: Regions, recording: Recording) -> Pieces:
    """The pieces that fill every recorded slice exactly once.

    Raises:
        LayoutError: If a slice is not fully owned by the trainer.
    """
    width = catalogue.width
    lookup = np.array([catalogue.index[s.name] for s in recording.sources], np.int64)
    source = recording.source.unpack().astype(np.int64)
    offset = widen(recording.offset.unpack().astype(np.int64), width, 0)
    size = widen(recording.size.unpack().astype(np.int64), width, 1)
    tensor = lookup[source] if len(source) else np.zeros(0, np.int64)
    slices, region = _candidates(regions, tensor, offset, size)
    low = np.maximum(offset[slices], regions.offset[region])
    high = np.minimum((offset + size)[slices], (regions.offset + regions.size)[region])
    hit = (high > low).all(axis=1)
    slices, region, low, high = slices[hit], region[hit], low[hit], high[hit]
    have = np.bincount(
        slices, weights=(high - low).prod(axis=1).astype(np.float64), minlength=len(source)
    )
    bad = np.flatnonzero(have != size.prod(axis=1))
    if len(bad):
        names = {recording.sources[int(source[i])].name for i in bad}
        raise LayoutError(
            f"slices of {len(names)} tensors are not fully owned by any trainer rank: "
            f"{shorten(names)}"
        )
    itemsize = catalogue.itemsizes()[tensor[slices]]
    slices, region, low, extent, itemsize = _split(
        regions, slices, region, low, high - low, itemsize
    )
    return Pieces(
        slice=slices,
        region=region,
        tensor=tensor[slices],
        slot=recording.slot.unpack().astype(np.int64)[slices],
        offset=low,
        size=extent,
        nbytes=extent.prod(axis=1) * itemsize,
    )


def _split(
    regions: Regions, slices: I64, region: I64, offset: I64, size: I64, itemsize: I64
) -> tuple[I64, I64, I64, I64, I64]:
    """Cuts large pieces of replicated regions along their first long dimension."""
    owners = np.diff(regions.owner_first)[region]
    nbytes = size.prod(axis=1) * itemsize
    want = np.where(owners > 1, -(-nbytes // SPLIT_BYTES), 1)
    dim = (size > 1).argmax(axis=1)
    rows = np.arange(len(slices))
    parts = np.clip(want, 1, np.maximum(size[rows, dim], 1))
    if (parts <= 1).all():
        return slices, region, offset, size, itemsize
    step = -(-size[rows, dim] // parts)
    parts = -(-size[rows, dim] // step)
    pick = np.repeat(rows, parts)
    number = np.arange(len(pick)) - (np.cumsum(parts) - parts)[pick]
    offset, size = offset[pick].copy(), size[pick].copy()
    along = dim[pick]
    every = np.arange(len(pick))
    start = number * step[pick]
    length = np.minimum(step[pick], size[every, along] - start)
    offset[every, along] += start
    size[every, along] = length
    return slices[pick], region[pick], offset, size, itemsize[pick]
