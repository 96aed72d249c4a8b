"""Chooses which owner sends each piece, so that senders carry equal loads.

Owners on the receiver's own GPU come first, then its host, then all others. Within the cheapest
owners, bytes are poured like water: every set of owners is filled so that its busiest member stays
as low as possible. Pieces stay in order, so a sender serves runs of neighbours, not single pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weight_sync.regions import Regions

I64 = NDArray[np.int64]


def owner_sets(regions: Regions) -> tuple[I64, list[tuple[int, ...]]]:
    """Numbers the distinct replica sets: (set number per region, the sets)."""
    numbers: dict[tuple[int, ...], int] = {}
    first = regions.owner_first
    single = np.diff(first) == 1
    out = np.empty(len(regions.tensor), np.int64)
    heads = regions.owner_rank[first[:-1]]
    for rank in np.unique(heads[single]).tolist():
        out[single & (heads == rank)] = numbers.setdefault((rank,), len(numbers))
    for g in np.flatnonzero(~single).tolist():
        owners = tuple(regions.owner_rank[first[g] : first[g + 1]].tolist())
        out[g] = numbers.setdefault(owners, len(numbers))
    return out, list(numbers)


def cheapest(owners: tuple[int, ...], cost: NDArray[np.int8]) -> tuple[int, ...]:
    """The owners with the smallest cost to one receiver."""
    prices = cost[list(owners)]
    low = prices.min()
    return tuple(o for o, p in zip(owners, prices, strict=True) if p == low)


def pour(amount: int, levels: Sequence[int]) -> list[int]:
    """Splits ``amount`` over vessels with water ``levels`` so that the highest stays lowest."""
    order = sorted(range(len(levels)), key=lambda i: levels[i])
    shares = [0] * len(levels)
    filled, left = 1, amount
    level = levels[order[0]]
    while filled < len(order) and (levels[order[filled]] - level) * filled <= left:
        left -= (levels[order[filled]] - level) * filled
        level = levels[order[filled]]
        filled += 1
    each, odd = divmod(left, filled)
    for k in range(filled):
        i = order[k]
        shares[i] = level - levels[i] + each + (1 if k < odd else 0)
    return shares


def _group(numbers: I64) -> list[tuple[int, I64]]:
    """Each distinct number with the rows that hold it, both ascending."""
    order = np.argsort(numbers, kind="stable")
    distinct, first = np.unique(numbers[order], return_index=True)
    return list(zip(distinct.tolist(), np.split(order, first[1:]), strict=True))


def _leaders(units: Sequence[NDArray[np.int32]]) -> I64:
    """Per piece of all workers, the first piece of its unit on the same worker, or itself."""
    out, at = [], 0
    for unit in units:
        lead = np.arange(len(unit), dtype=np.int64)
        tied = np.flatnonzero(unit >= 0)
        if len(tied):
            _, first, inverse = np.unique(unit[tied], return_index=True, return_inverse=True)
            lead[tied] = tied[first[inverse]]
        out.append(lead + at)
        at += len(unit)
    return np.concatenate(out)


def assign(
    regions: Regions,
    piece_region: Sequence[I64],
    piece_bytes: Sequence[I64],
    piece_unit: Sequence[NDArray[np.int32]],
    worker_class: Sequence[int],
    cost: NDArray[np.int8],
) -> list[NDArray[np.int32]]:
    """Chooses a sender per (worker, piece).

    Args:
        regions: Distinct regions with owners.
        piece_region: Per class, int64 ``[n]`` region of each piece.
        piece_bytes: Per class, int64 ``[n]`` bytes of each piece.
        piece_unit: Per class, int32 ``[n]``; pieces of a worker with equal unit >= 0 and equal
            owners get the same sender.
        worker_class: Class of each worker.
        cost: int8 ``[trainer ranks, workers]``; smaller is closer.

    Returns:
        Per worker, int32 ``[n]`` trainer rank of each piece of its class.
    """
    set_of_region, sets = owner_sets(regions)
    set_of_piece = [set_of_region[r] for r in piece_region]
    senders = [np.full(len(piece_region[c]), -1, np.int32) for c in worker_class]
    rows_of_set = [_group(numbers) for numbers in set_of_piece]
    demand: dict[tuple[int, ...], list[tuple[int, I64]]] = defaultdict(list)
    nearest: dict[tuple[bytes, int], tuple[int, ...]] = {}
    for worker, c in enumerate(worker_class):
        price = np.ascontiguousarray(cost[:, worker])
        prices = price.tobytes()
        for number, rows in rows_of_set[c]:
            if (prices, number) not in nearest:
                nearest[prices, number] = cheapest(sets[number], price)
            demand[nearest[prices, number]].append((worker, rows))
    load: dict[int, int] = defaultdict(int)
    for owners in sorted(demand, key=lambda o: (len(o), o)):
        parts = demand[owners]
        lead = _leaders([piece_unit[worker_class[w]][rows] for w, rows in parts])
        sizes = np.concatenate([piece_bytes[worker_class[w]][rows] for w, rows in parts])
        sizes = np.bincount(lead, weights=sizes, minlength=len(lead)).astype(np.int64)
        total = int(sizes.sum())
        shares = pour(total, [load[o] for o in owners])
        bounds = np.cumsum(shares)
        middle = np.cumsum(sizes) - (sizes + 1) // 2
        chosen = np.searchsorted(bounds, middle, side="right").clip(max=len(owners) - 1)
        chosen = chosen[lead]
        picked = np.array(owners, np.int32)[chosen]
        at = 0
        for worker, rows in parts:
            senders[worker][rows] = picked[at : at + len(rows)]
            at += len(rows)
        sent = np.bincount(chosen, weights=sizes, minlength=len(owners))
        for owner, amount in zip(owners, sent.tolist(), strict=True):
            load[owner] += int(amount)
    return senders
