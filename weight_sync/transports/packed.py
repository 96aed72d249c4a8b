"""Packed streams: how pieces lie in the buckets that broadcast and reshard put on the wire.

Both sides compute the same layout from their own part of the plan; what either side's memory looks
like never matters.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weight_sync.buckets import cut

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Stream:
    """What one sender sends to one receiver, cut into buckets.

    Attributes:
        rows: int64 ``[n]``, pieces of the receiver's program (or of the sender's task), in order.
        bucket: int64 ``[n]``, ascending.
        offset: int64 ``[n]``, byte offset of each piece in its bucket.
        nbytes: int64 ``[buckets]``.
    """

    rows: I64
    bucket: I64
    offset: I64
    nbytes: I64

    @property
    def count(self) -> int:
        """Number of buckets."""
        return len(self.nbytes)

    def members(self, bucket: int) -> slice:
        """Which entries of the stream lie in a bucket."""
        first, last = np.searchsorted(self.bucket, [bucket, bucket + 1]).tolist()
        return slice(first, last)


def cut_stream(
    rows: I64, size: I64, item: I64, unit: NDArray[np.int32], bucket_bytes: int
) -> Stream:
    """Cuts pieces into buckets.

    Args:
        rows: int64 ``[n]``, numbers of the pieces.
        size: int64 ``[n, R]``.
        item: int64 ``[n]``, bytes per element on the wire.
        unit: int32 ``[n]``, neighbours with equal unit >= 0 share a bucket.
        bucket_bytes: Where to cut.
    """
    buckets = cut(size.prod(axis=1) * item, unit, bucket_bytes)
    return Stream(rows, buckets.bucket, buckets.offset, buckets.nbytes)


def packed_strides(size: I64) -> I64:
    """Element strides of densely packed boxes, int64 ``[n, R]`` for sizes ``[n, R]``."""
    out = np.ones_like(size)
    for dim in range(size.shape[1] - 2, -1, -1):
        out[:, dim] = out[:, dim + 1] * size[:, dim + 1]
    return out


def cuts_digest(nbytes: I64) -> str:
    """Equal where two sides cut the same buckets."""
    return hashlib.blake2b(np.ascontiguousarray(nbytes).tobytes(), digest_size=8).hexdigest()
