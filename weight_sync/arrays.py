"""Integer arrays on the wire: msgspec structs whose sizes are checked before use."""

from __future__ import annotations

import sys

import msgspec
import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import LayoutError

_LITTLE = sys.byteorder == "little"
_ALLOWED = ("int32", "int64", "uint64", "uint8")
# Asking a dtype for its name takes longer than everything else in packing a small array.
_NAMES = {np.dtype(name): name for name in _ALLOWED}


class PackedArray(msgspec.Struct, frozen=True, array_like=True):
    """A C-contiguous little-endian array as bytes.

    Attributes:
        dtype: One of int32, int64, uint64, uint8.
        shape: Sizes, all non-negative.
        data: Exactly ``prod(shape) * itemsize`` bytes.
    """

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def unpack(self) -> NDArray[np.generic]:
        """Returns the array (read-only view of the bytes).

        Raises:
            LayoutError: If dtype, shape and byte count do not fit together.
        """
        if self.dtype not in _ALLOWED:
            raise LayoutError(f"array dtype {self.dtype!r} is not one of {_ALLOWED}")
        dtype = np.dtype(self.dtype).newbyteorder("<")
        count = 1
        for size in self.shape:
            if size < 0:
                raise LayoutError(f"array shape {self.shape} has a negative size")
            count *= size
        if count * dtype.itemsize != len(self.data):
            raise LayoutError(
                f"array of shape {self.shape} and dtype {self.dtype} needs "
                f"{count * dtype.itemsize} bytes but {len(self.data)} came"
            )
        return np.frombuffer(self.data, dtype=dtype).reshape(self.shape)


def pack(array: NDArray[np.generic]) -> PackedArray:
    """Packs an int32, int64, uint64 or uint8 array.

    Raises:
        LayoutError: If it has another dtype.
    """
    name = _NAMES.get(array.dtype)
    if name is None:
        raise LayoutError(f"array dtype {array.dtype} is not one of {_ALLOWED}")
    little = array if _LITTLE else array.astype(array.dtype.newbyteorder("<"))
    return PackedArray(name, array.shape, little.tobytes())
