"""Float casts on bit patterns, for the CPU loops; the CUDA kernels follow the same rule.

Rule: round to nearest even, overflow to infinity, subnormals kept, exactly as ``Tensor.to``. Only
NaN differs: torch itself returns different NaN patterns for vectorized, scalar and CUDA casts, so
here every NaN becomes the quiet NaN of the target (float32 0x7FC00000, bfloat16 0x7FC0, float16
0x7E00) and a digest of cast values is the same wherever it is computed.
All casts go through float32, which holds every bfloat16 and float16 value exactly.
"""

from __future__ import annotations

import numpy as np
from numba import njit

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}


@njit(inline="always")
def _half_to_float(bits: int) -> int:
    sign = (bits & 0x8000) << 16
    exponent = (bits >> 10) & 0x1F
    mantissa = bits & 0x3FF
    if exponent == 31:
        return 0x7FC00000 if mantissa else sign | 0x7F800000
    if exponent:
        return sign | ((exponent + 112) << 23) | (mantissa << 13)
    if mantissa == 0:
        return sign
    # A float16 subnormal is a normal float32: move the leading one to the implicit place.
    exponent = 113
    while mantissa & 0x400 == 0:
        mantissa <<= 1
        exponent -= 1
    return sign | (exponent << 23) | ((mantissa & 0x3FF) << 13)


@njit(inline="always")
def _float_to_half(bits: int) -> int:
    sign = (bits >> 16) & 0x8000
    size = bits & 0x7FFFFFFF
    if size > 0x7F800000:
        return 0x7E00
    if size >= 0x47800000:
        # 65536 and above, where even the largest float16 is more than half a step away.
        return sign | 0x7C00
    if size >= 0x38800000:
        # Normal: re-bias; a carry out of the mantissa moves to the exponent, or to infinity.
        return sign | ((size - (112 << 23) + 0xFFF + ((size >> 13) & 1)) >> 13)
    shift = 126 - (size >> 23)
    if shift > 24:
        return sign
    mantissa = (size & 0x7FFFFF) | 0x800000
    kept = mantissa >> shift
    rest = mantissa & ((1 << shift) - 1)
    half = 1 << (shift - 1)
    if rest > half or (rest == half and kept & 1):
        kept += 1
    return sign | kept


@njit(inline="always")
def cast_bits(bits: int, src: int, dst: int) -> np.uint32:
    """One element's bits cast from kind ``src`` to kind ``dst`` (values of ``KINDS``)."""
    wide = np.int64(bits)
    if src == BFLOAT16:
        wide = wide << 16
    elif src == FLOAT16:
        wide = np.int64(_half_to_float(wide))
    if dst == FLOAT16:
        return np.uint32(_float_to_half(wide))
    nan = (wide & 0x7FFFFFFF) > 0x7F800000
    if dst == BFLOAT16:
        return np.uint32(0x7FC0 if nan else (wide + 0x7FFF + ((wide >> 16) & 1)) >> 16)
    return np.uint32(0x7FC00000 if nan else wide)
