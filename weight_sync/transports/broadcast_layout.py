"""Which rank broadcasts what, in which bucket, and what each worker keeps of it.

Every region that a worker reads has one root among its owners. A root packs its regions whole;
regions larger than a bucket are cut into blocks. Buckets go out in one order, root after root.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from weight_sync.arrays import pack
from weight_sync.buckets import cut
from weight_sync.plan import Plan
from weight_sync.program import BroadcastKeeps, BroadcastSends
from weight_sync.transports.packed import packed_strides
from weight_sync.transports.rounds import padded

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class BroadcastLayout:
    """All buckets of an epoch and the blocks in them.

    Attributes:
        plan: The plan it was made from.
        root: int32 ``[buckets]``, trainer rank.
        nbytes: int64 ``[buckets]``.
        closed: bool ``[buckets]``, whether no region and no unit goes on after the bucket.
        region: int64 ``[blocks]``, distinct region.
        offset: int64 ``[blocks, R]``, global offset.
        size: int64 ``[blocks, R]``.
        bucket: int64 ``[blocks]``, ascending.
        start: int64 ``[blocks]``, byte offset in the bucket.
    """

    plan: Plan
    root: NDArray[np.int32]
    nbytes: I64
    closed: NDArray[np.bool_]
    region: I64
    offset: I64
    size: I64
    bucket: I64
    start: I64

    def sends(self, rank: int) -> BroadcastSends:
        """The blocks that a trainer rank packs."""
        mine = np.flatnonzero(self.root[self.bucket] == rank)
        regions = self.plan.regions
        span = self.plan.membership.trainer_world_size + 1
        key = np.repeat(np.arange(len(regions.tensor)), np.diff(regions.owner_first))
        at = np.searchsorted(key * span + regions.owner_rank, self.region[mine] * span + rank)
        return BroadcastSends(
            root=pack(self.root),
            nbytes=pack(self.nbytes),
            region=pack(regions.owner_region[at].astype(np.int32)),
            offset=pack(self.offset[mine]),
            size=pack(self.size[mine]),
            bucket=pack(self.bucket[mine].astype(np.int32)),
            start=pack(self.start[mine]),
        )

    def keeps(self, class_id: int) -> BroadcastKeeps:
        """What workers of a class keep."""
        row, block, offset, size = self._kept[class_id]
        item = self.plan.catalogue.itemsizes()[self.plan.regions.tensor[self.region[block]]]
        stride = packed_strides(self.size)[block]
        inside = ((offset - self.offset[block]) * stride).sum(axis=1)
        return BroadcastKeeps(
            root=pack(self.root),
            nbytes=pack(self.nbytes),
            row=pack(row.astype(np.int32)),
            bucket=pack(self.bucket[block].astype(np.int32)),
            start=pack(self.start[block] // item + inside),
            stride=pack(stride),
            offset=pack(offset),
            size=pack(size),
        )

    def kept_bytes(self, class_id: int) -> I64:
        """int64 ``[buckets]``: bytes that workers of a class keep, counted at the last bucket."""
        row, block, _, _ = self._kept[class_id]
        pieces = self.plan.pieces[class_id]
        last = np.zeros(len(pieces), np.int64)
        np.maximum.at(last, row, self.bucket[block])
        nbytes = padded(pieces.nbytes[self.plan.orders[class_id]])
        return np.bincount(last, weights=nbytes, minlength=len(self.nbytes)).astype(np.int64)

    @cached_property
    def _kept(self) -> tuple[tuple[I64, I64, I64, I64], ...]:
        """Per class: piece of the program, block, and the box both have in common."""
        regions = self.plan.regions
        count = np.bincount(self.region, minlength=len(regions.tensor))
        order = np.lexsort([*self.offset.T[::-1], self.region])
        first = np.cumsum(count) - count
        step, dim = self._steps(order, first, count)
        out = []
        for c, pieces in enumerate(self.plan.pieces):
            rows = self.plan.orders[c]
            g, low, size = pieces.region[rows], pieces.offset[rows], pieces.size[rows]
            along, every = dim[g], np.arange(len(g))
            begin = low[every, along] - regions.offset[g, along]
            lead = begin // step[g]
            many = (begin + size[every, along] - 1) // step[g] - lead + 1
            row = np.repeat(every, many)
            number = np.arange(len(row)) - (np.cumsum(many) - many)[row]
            block = order[first[g[row]] + lead[row] + number]
            start = np.maximum(low[row], self.offset[block])
            end = np.minimum((low + size)[row], (self.offset + self.size)[block])
            out.append((row, block, start, end - start))
        return tuple(out)

    def _steps(self, order: I64, first: I64, count: I64) -> tuple[I64, I64]:
        """Per distinct region: rows per block, and the dimension that blocks are cut along."""
        size = self.plan.regions.size
        dim = (size > 1).argmax(axis=1)
        step = size[np.arange(len(size)), dim].copy()
        used = np.flatnonzero(count > 0)
        head = order[first[used]]
        step[used] = self.size[head, dim[used]]
        return step, dim


def broadcast_layout(plan: Plan) -> BroadcastLayout:
    """Chooses roots and cuts buckets, the same for everybody from one plan."""
    regions, catalogue = plan.regions, plan.catalogue
    used = np.unique(np.concatenate([p.region for p in plan.pieces]))
    unit = plan.units[regions.tensor[used]].astype(np.int64)
    group = np.where(unit >= 0, unit, int(unit.max(initial=-1)) + 1 + np.arange(len(used)))
    item = catalogue.itemsizes()[regions.tensor[used]]
    root = _roots(plan, used, group, regions.size[used].prod(axis=1) * item)
    lead = np.full(int(group.max(initial=0)) + 1, len(used), np.int64)
    np.minimum.at(lead, group, np.arange(len(used)))
    order = np.lexsort([np.arange(len(used)), lead[group], root])
    used, group, root, item = used[order], group[order], root[order], item[order]

    size = regions.size[used]
    dim = (size > 1).argmax(axis=1)
    every = np.arange(len(used))
    length = np.maximum(size[every, dim], 1)
    row_bytes = np.maximum(size.prod(axis=1) * item // length, 1)
    step = np.clip(plan.bucket_bytes // row_bytes, 1, length)
    parts = -(-length // step)
    pick = np.repeat(every, parts)
    number = np.arange(len(pick)) - (np.cumsum(parts) - parts)[pick]
    offset, extent = regions.offset[used][pick].copy(), size[pick].copy()
    along, rows = dim[pick], np.arange(len(pick))
    offset[rows, along] += number * step[pick]
    extent[rows, along] = np.minimum(step[pick], length[pick] - number * step[pick])

    nbytes = padded(extent.prod(axis=1) * item[pick])
    together = np.bincount(group[pick], weights=nbytes)[group[pick]] <= plan.bucket_bytes
    tie = np.where(together, group[pick], -1).astype(np.int32)
    roots: list[NDArray[np.int32]] = []
    sizes: list[I64] = []
    closed: list[NDArray[np.bool_]] = []
    bucket, start = np.zeros(len(pick), np.int64), np.zeros(len(pick), np.int64)
    for rank in np.unique(root).tolist():
        mine = np.flatnonzero(root[pick] == rank)
        cuts = cut(nbytes[mine], tie[mine], plan.bucket_bytes)
        bucket[mine] = cuts.bucket + sum(len(s) for s in sizes)
        start[mine] = cuts.offset
        ends = np.append(np.flatnonzero(np.diff(cuts.bucket)), len(mine) - 1)
        after = np.append(group[pick][mine], -1)
        closed.append(after[ends] != after[ends + 1])
        roots.append(np.full(cuts.count, rank, np.int32))
        sizes.append(cuts.nbytes)
    return BroadcastLayout(
        plan=plan,
        root=np.concatenate(roots),
        nbytes=np.concatenate(sizes),
        closed=np.concatenate(closed),
        region=used[pick],
        offset=offset,
        size=extent,
        bucket=bucket,
        start=start,
    )


def _roots(plan: Plan, used: I64, group: I64, nbytes: I64) -> I64:
    """One owner per region, the same for all of a unit, so that owners carry equal loads."""
    first = plan.regions.owner_first
    heads = plan.regions.owner_rank[first[used]].astype(np.int64)
    single = first[used + 1] - first[used] == 1
    load: dict[int, int] = defaultdict(int)
    for rank in np.unique(heads[single]).tolist():
        load[rank] = int(nbytes[single & (heads == rank)].sum())
    chosen: dict[tuple[int, tuple[int, ...]], int] = {}
    for i in np.flatnonzero(~single).tolist():
        g = int(used[i])
        owners = tuple(plan.regions.owner_rank[first[g] : first[g + 1]].tolist())
        key = (int(group[i]), owners)
        heads[i] = chosen.setdefault(key, min(owners, key=lambda rank: (load[rank], rank)))
        load[int(heads[i])] += int(nbytes[i])
    return heads
