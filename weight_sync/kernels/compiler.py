"""Compiles copies and digests for the device that their buffers are on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weight_sync.errors import LayoutError
from weight_sync.kernels.base import CompiledCopy, CompiledDigest, RawBuffer, Side
from weight_sync.kernels.pieces import PieceTable

if TYPE_CHECKING:
    import torch


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
