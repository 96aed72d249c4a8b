"""The digest that both sides of a refit compute, and its reference form.

Definition: for a tensor of ``itemsize`` 1, 2 or 4 let ``u(v)`` be the element's bits as an unsigned
integer; the digest is ``sum((u(v_i) + 1) * weight(i)) mod 2**64`` over the flat row-major indices
``i`` of the global tensor. An 8-byte element counts as two 4-byte elements with indices ``2 i``
(low half) and ``2 i + 1``. ``weight(i)`` is odd and below 2**32, so one wrong element always
changes the sum, and any set of wrong elements changes it with probability about ``1 - 2**-32``. A
sum does not depend on order or on how the tensor is split, so shards can be hashed where they are.
The form is a multilinear hash (Carter and Wegman, 1979) with weights from an integer mixer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

C1 = 0x9E3779B1
C2 = 0x85EBCA6B
C3 = 0xC2B2AE35
MASK32 = 0xFFFFFFFF


def weights(index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """``weight(i)`` for flat indices: uint64 in, odd values below 2**32 out."""
    mask = np.uint64(MASK32)
    low = index & mask
    high = index >> np.uint64(32)
    x = ((low * np.uint64(C1)) & mask) ^ ((high * np.uint64(C3)) & mask)
    x ^= x >> np.uint64(15)
    x = (x * np.uint64(C2)) & mask
    x ^= x >> np.uint64(13)
    return x | np.uint64(1)


def reference(bits: NDArray[np.unsignedinteger], index: NDArray[np.uint64]) -> int:
    """Digest of elements given as unsigned integers of 1, 2, 4 or 8 bytes and flat indices."""
    flat = bits.reshape(-1)
    index = index.reshape(-1).astype(np.uint64)
    if flat.dtype.itemsize == 8:
        flat = flat.view(np.uint32)
        index = np.stack([index * 2, index * 2 + 1], axis=1).reshape(-1).astype(np.uint64)
    with np.errstate(over="ignore"):
        terms = (flat.astype(np.uint64) + np.uint64(1)) * weights(index)
        return int(terms.sum(dtype=np.uint64))
