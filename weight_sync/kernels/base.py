"""What buffers, compiled copies and compiled digests look like on every device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Side = Literal["src", "dst"]


@dataclass(frozen=True)
class RawBuffer:
    """Memory without a tensor: a peer's storage, or one that must not be kept alive.

    Whoever runs what was compiled from it sees to it that the memory is there.

    Attributes:
        address: Pointer to the first byte.
        nbytes: Length in bytes.
        device: Ordinal of the CUDA device that can read it, which is the one kernels run on; None
            for host memory.
    """

    address: int
    nbytes: int
    device: int | None


class CompiledCopy(Protocol):
    """A copy program: compiled once, run every refit.

    Attributes:
        nbytes: Bytes one run writes.
    """

    nbytes: int

    def run(self, stream: int | None = None) -> None:
        """Copies every piece.

        On CUDA this only enqueues; the caller synchronizes the stream. On CPU the bytes are there
        on return.

        Args:
            stream: CUDA stream pointer; torch's current stream of the device by default.
        """
        ...


class CompiledDigest(Protocol):
    """A digest program over one side of the pieces."""

    def run(self) -> NDArray[np.uint64]:
        """Computes the digests and waits for them.

        Returns:
            uint64 ``[slots]``: sums modulo 2**64, as defined in ``kernels.mix``.
        """
        ...
