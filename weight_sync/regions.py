"""The distinct regions all trainer ranks own together, with their replica sets.

Regions that several ranks own are one region with several owners. Together the regions of a tensor
must tile it exactly: a hole means that some rank's metadata is wrong, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import LayoutError, shorten
from weight_sync.layout import Box
from weight_sync.manifest import Catalogue, Manifest, widen

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Regions:
    """Distinct regions sorted by tensor and offset.

    Attributes:
        tensor: int64 ``[g]``, catalogue index.
        offset: int64 ``[g, R]``.
        size: int64 ``[g, R]``.
        first: int64 ``[tensors + 1]``, regions of tensor ``t`` are ``first[t]:first[t + 1]``.
        cut_dim: int64 ``[tensors]``, the one dimension a tensor is cut along, -1 if several.
        owner_first: int64 ``[g + 1]``, owners of region ``g`` are ``owner_first[g]:...``.
        owner_rank: int64, trainer rank per owner, ascending within a region.
        owner_region: int64, number of the region in that rank's own manifest.
    """

    tensor: I64
    offset: I64
    size: I64
    first: I64
    cut_dim: I64
    owner_first: I64
    owner_rank: I64
    owner_region: I64


def unite(catalogue: Catalogue, manifests: Sequence[Manifest]) -> Regions:
    """Collects, deduplicates and checks the regions of all ranks.

    Raises:
        LayoutError: If the regions of a tensor leave a hole.
    """
    width = catalogue.width
    parts: list[tuple[I64, I64, I64, I64, I64]] = []
    for manifest in manifests:
        lookup = np.array([catalogue.index[t.name] for t in manifest.tensors], np.int64)
        owner = manifest.owner.unpack().astype(np.int64)
        if len(owner):
            parts.append(
                (
                    lookup[owner],
                    widen(manifest.offset.unpack().astype(np.int64), width, 0),
                    widen(manifest.size.unpack().astype(np.int64), width, 1),
                    np.full(len(owner), manifest.rank, np.int64),
                    np.arange(len(owner), dtype=np.int64),
                )
            )
    if not parts:
        raise LayoutError("no trainer rank owns any region; is the module empty?")
    tensor, offset, size, rank, number = (np.concatenate(c) for c in zip(*parts, strict=True))
    alive = (size > 0).all(axis=1)
    tensor, offset, size, rank, number = (a[alive] for a in (tensor, offset, size, rank, number))
    tensor, offset, size, rank, number = _cut_overlaps(
        catalogue, tensor, offset, size, rank, number
    )
    keys = np.concatenate([tensor[:, None], offset, size, rank[:, None]], axis=1)
    order = np.lexsort(keys.T[::-1])
    keys = keys[order]
    rank, number = rank[order], number[order]
    fresh = np.ones(len(keys), bool)
    fresh[1:] = (keys[1:, :-1] != keys[:-1, :-1]).any(axis=1)
    owner_first = np.append(np.flatnonzero(fresh), len(keys)).astype(np.int64)
    head = owner_first[:-1]
    tensor, offset, size = keys[head, 0], keys[head, 1 : 1 + width], keys[head, 1 + width : -1]
    first = np.searchsorted(tensor, np.arange(len(catalogue.tensors) + 1)).astype(np.int64)
    shapes = catalogue.shapes()
    partial = size != shapes[tensor]
    cut = np.zeros((len(catalogue.tensors), width), bool)
    np.logical_or.at(cut, tensor, partial)
    cut_dim = np.where(cut.sum(axis=1) <= 1, cut.argmax(axis=1), -1).astype(np.int64)
    _check_holes(catalogue, tensor, size)
    return Regions(tensor, offset, size, first, cut_dim, owner_first, rank, number)


def _check_holes(catalogue: Catalogue, tensor: I64, size: I64) -> None:
    have = np.bincount(
        tensor, weights=size.prod(axis=1).astype(np.float64), minlength=len(catalogue.tensors)
    )
    want = catalogue.shapes().prod(axis=1).astype(np.float64)
    bad = np.flatnonzero(have != want)
    if len(bad):
        what = [
            f"{catalogue.tensors[t].name} (global shape {list(catalogue.tensors[t].shape)}, "
            f"{int(have[t])} of {int(want[t])} elements owned)"
            for t in bad
        ]
        raise LayoutError(
            f"the regions of {len(bad)} tensors do not tile them: {shorten(what)}. Check that all "
            "trainer ranks sent a manifest and that tp/ep metadata gives global shapes."
        )


def _overlapping(catalogue: Catalogue, tensor: I64, offset: I64, size: I64) -> list[int]:
    """Tensors whose distinct boxes overlap. Expects one row per distinct box."""
    shapes = catalogue.shapes()
    order = np.lexsort([*offset.T[::-1], tensor])
    tensor, offset, size = tensor[order], offset[order], size[order]
    partial = size != shapes[tensor]
    cut = np.zeros(shapes.shape, bool)
    np.logical_or.at(cut, tensor, partial)
    single = cut.sum(axis=1) <= 1
    dim = cut.argmax(axis=1)[tensor]
    rows = np.arange(len(tensor))
    start, count = offset[rows, dim], size[rows, dim]
    clash = (tensor[1:] == tensor[:-1]) & (start[1:] < start[:-1] + count[:-1])
    found = set(tensor[1:][clash & single[tensor[1:]]].tolist())
    # Tensors cut along several dimensions: few of them, compare all pairs of their boxes.
    for t in np.unique(tensor[~single[tensor]]).tolist():
        at = np.flatnonzero(tensor == t)
        low = np.maximum(offset[at][:, None], offset[at][None])
        high = np.minimum((offset + size)[at][:, None], (offset + size)[at][None])
        hits = (high > low).all(axis=2)
        np.fill_diagonal(hits, False)
        if hits.any():
            found.add(t)
    return sorted(found)


def _cut_overlaps(
    catalogue: Catalogue, tensor: I64, offset: I64, size: I64, rank: I64, number: I64
) -> tuple[I64, I64, I64, I64, I64]:
    """Replaces boxes that overlap without being equal by disjoint cells with their owners."""
    keys = np.concatenate([tensor[:, None], offset, size], axis=1)
    distinct = np.unique(keys, axis=0)
    width = offset.shape[1]
    bad = _overlapping(
        catalogue, distinct[:, 0], distinct[:, 1 : 1 + width], distinct[:, 1 + width :]
    )
    if not bad:
        return tensor, offset, size, rank, number
    keep = ~np.isin(tensor, bad)
    rows: list[list[int]] = []
    for t in bad:
        at = np.flatnonzero(tensor == t)
        boxes = [Box(tuple(offset[i].tolist()), tuple(size[i].tolist())) for i in at]
        cells: list[Box] = []
        for box in sorted(set(boxes), key=lambda b: (b.elements, b.offset)):
            left = [box]
            for cell in cells:
                left = [piece for part in left for piece in part.subtract(cell)]
            cells.extend(left)
        for cell in cells:
            for i, box in zip(at, boxes, strict=True):
                if box.intersect(cell) == cell:
                    rows.append([t, *cell.offset, *cell.size, int(rank[i]), int(number[i])])
    extra = np.array(rows, np.int64).reshape(-1, 2 * width + 3)
    return (
        np.concatenate([tensor[keep], extra[:, 0]]),
        np.concatenate([offset[keep], extra[:, 1 : 1 + width]]),
        np.concatenate([size[keep], extra[:, 1 + width : 1 + 2 * width]]),
        np.concatenate([rank[keep], extra[:, -2]]),
        np.concatenate([number[keep], extra[:, -1]]),
    )
