"""What a compiled copy or digest looks like, and how one is made for any device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import LayoutError
from weight_sync.kernels.pieces import PieceTable

if TYPE_CHECKING:
    import torch

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


def compile_copy(
    tables: Sequence[PieceTable],
    src: Sequence[torch.Tensor | RawBuffer],
    dst: Sequence[torch.Tensor | RawBuffer],
) -> CompiledCopy:
    """Compiles pieces to one batched copy.

    Where ``src_dtype`` and ``dst_dtype`` differ values are rounded to nearest even, as
    ``Tensor.to`` does; every NaN becomes the one NaN of ``kernels.casts``, so that digests of both
    sides agree.

    Args:
        tables: Pieces; their ``src_buffer`` and ``dst_buffer`` index the two lists below.
        src: 1-D uint8 tensors, each a whole storage, or mapped peer memory.
        dst: The same for the side that is written. CUDA kernels run on its device.

    Raises:
        LayoutError: If a piece reaches outside its buffer or a cast is not supported.
        EnvironmentUnsupportedError: If CUDA kernels cannot be built on this machine.
    """
    if _on_cuda([*src, *dst]):
        from weight_sync.kernels.copy_cuda import CudaCopy

        return CudaCopy(tables, src, dst)
    from weight_sync.kernels.copy_cpu import CpuCopy

    return CpuCopy(tables, src, dst)


def compile_digest(
    tables: Sequence[PieceTable],
    buffers: Sequence[torch.Tensor | RawBuffer],
    side: Side,
    slots: int,
) -> CompiledDigest:
    """Compiles pieces to one digest of what lies in ``buffers``.

    Args:
        tables: Pieces, the same ones that the copy runs.
        buffers: The buffers of ``side``, as for :func:`compile_copy`, all on one device.
        side: ``"src"`` reads through the source offsets and hashes values cast to ``dst_dtype``;
            ``"dst"`` hashes the destination bits as they lie. After a copy both agree.
        slots: Length of the result; every ``slot`` of the tables is below it.

    Raises:
        LayoutError: If a piece reaches outside its buffer, or a slot or cast is not valid.
        EnvironmentUnsupportedError: If CUDA kernels cannot be built on this machine.
    """
    if _on_cuda(buffers):
        from weight_sync.kernels.digest_cuda import CudaDigest

        return CudaDigest(tables, buffers, side, slots)
    from weight_sync.kernels.digest_cpu import CpuDigest

    return CpuDigest(tables, buffers, side, slots)


def _on_cuda(buffers: Sequence[torch.Tensor | RawBuffer]) -> bool:
    kinds = {_kind(b) for b in buffers}
    if len(kinds) > 1:
        raise LayoutError(
            f"one compile was given buffers on {' and '.join(sorted(kinds))}; stage host memory to "
            "the device first"
        )
    if kinds - {"cpu", "cuda"}:
        raise LayoutError(f"no kernels for device type {kinds.pop()!r}; use cpu or cuda buffers")
    return kinds == {"cuda"}


def _kind(buffer: torch.Tensor | RawBuffer) -> str:
    if isinstance(buffer, RawBuffer):
        return "cpu" if buffer.device is None else "cuda"
    return buffer.device.type
