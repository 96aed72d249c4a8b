"""Element types by their torch names, without importing torch."""

from __future__ import annotations

from weight_sync.errors import LayoutError

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
CASTABLE = frozenset({"float32", "float16", "bfloat16"})


def itemsize(dtype: str) -> int:
    """Bytes per element of a torch dtype name such as ``"bfloat16"``.

    Raises:
        LayoutError: If the dtype cannot travel.
    """
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise LayoutError(
            f"dtype {dtype!r} cannot be sent; supported: {', '.join(ITEMSIZE)}"
        ) from None
