"""Cuts a packed stream of pieces into buckets; sender and receiver do it alike from the plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import ConfigError

I64 = NDArray[np.int64]

# Every piece starts at a multiple of this, so that copies can use the widest accesses.
ALIGN = 256


@dataclass(frozen=True)
class Buckets:
    """Where each piece lies in the stream.

    Attributes:
        bucket: int64 ``[n]``, bucket of each piece, ascending.
        offset: int64 ``[n]``, byte offset of each piece in its bucket.
        nbytes: int64 ``[buckets]``, used bytes per bucket.
    """

    bucket: I64
    offset: I64
    nbytes: I64

    @property
    def count(self) -> int:
        """Number of buckets; 0 for an empty stream."""
        return len(self.nbytes)


def cut(piece_bytes: I64, unit: NDArray[np.int32], limit: int) -> Buckets:
    """Cuts pieces into buckets of at most ``limit`` bytes.

    A piece, or a group of neighbours with one unit, that is larger than the limit gets a bucket of
    its own; units are never split.

    Args:
        piece_bytes: int64 ``[n]`` bytes per piece, in stream order.
        unit: int32 ``[n]``; neighbours with equal unit >= 0 stay together.
        limit: Bucket size in bytes.

    Raises:
        ConfigError: If the limit is not positive.
    """
    if limit < 1:
        raise ConfigError(f"bucket size must be positive, not {limit} bytes")
    n = len(piece_bytes)
    if n == 0:
        empty = np.zeros(0, np.int64)
        return Buckets(empty, empty, empty)
    padded = -(-piece_bytes.astype(np.int64) // ALIGN) * ALIGN
    fresh = np.ones(n, bool)
    fresh[1:] = (unit[1:] < 0) | (unit[1:] != unit[:-1])
    group = np.cumsum(fresh) - 1
    group_bytes = np.bincount(group, weights=padded).astype(np.int64)
    ends = np.cumsum(group_bytes)
    bucket_of_group = np.zeros(len(group_bytes), np.int64)
    start, number, base = 0, 0, 0
    while start < len(group_bytes):
        stop = int(np.searchsorted(ends, base + limit, side="right"))
        stop = max(stop, start + 1)
        bucket_of_group[start:stop] = number
        base, start, number = int(ends[stop - 1]), stop, number + 1
    bucket = bucket_of_group[group]
    total = np.cumsum(padded) - padded
    first = np.searchsorted(bucket, np.arange(number))
    offset = total - total[first][bucket]
    nbytes = np.bincount(bucket, weights=padded, minlength=number).astype(np.int64)
    return Buckets(bucket, offset, nbytes)
