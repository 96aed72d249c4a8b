"""What is quantized in one go: sources, and where their values and scales are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weight_sync.errors import LayoutError, QuantizationError, shorten
from weight_sync.quantize.format import SOURCE_DTYPES, Format, scale_dtype, scale_shape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Work:
    """One tensor to quantize; all three tensors are on one device.

    Attributes:
        name: For messages.
        source: bfloat16 or float32 ``[..., N, K]``; neighbours along K are neighbours in memory,
            other strides are free.
        value: uint8 of the same shape, contiguous; receives E4M3 bytes.
        scale: uint8 (MXFP8) or float32 of ``format.scale_shape``, contiguous.
    """

    name: str
    source: torch.Tensor
    value: torch.Tensor
    scale: torch.Tensor


class CompiledQuantize(Protocol):
    """A quantize program: compiled once for fixed storages, run every refit.

    Attributes:
        nbytes: Bytes of values and scales that one run writes.
    """

    nbytes: int

    def run(self, stream: int | None = None) -> None:
        """Quantizes everything.

        On CUDA this only enqueues; on CPU the bytes are there on return.

        Args:
            stream: CUDA stream pointer; torch's current stream of the device by default.
        """
        ...

    def before(self, stream: int) -> None:
        """Orders what is enqueued on a stream from now on after the last run.

        On CPU there is nothing to do.

        Args:
            stream: CUDA stream pointer.
        """
        ...

    def infinities(self, seconds: float | None = None) -> dict[str, int]:
        """Waits for the last run and tells which tensors hold how many infinite elements.

        Args:
            seconds: Longest wait; ``WEIGHT_SYNC_DEADLINE_S`` by default.

        Raises:
            DeadlineError: If the GPU did not finish in time.
        """
        ...

    def check(self, seconds: float | None = None) -> None:
        """Waits for the last run and refuses what it could not represent.

        Call it before the bytes count: what was written for a refused tensor is not its value.

        Args:
            seconds: Longest wait; ``WEIGHT_SYNC_DEADLINE_S`` by default.

        Raises:
            QuantizationError: Naming the tensors that hold infinities, and how many.
            DeadlineError: If the GPU did not finish in time.
        """
        ...


class CompiledFp8Tensor(CompiledQuantize, Protocol):
    """FP8 per tensor, in two steps for ranks that share a matrix: ``run`` is one after the other.

    Attributes:
        amax: float32 ``[matrices]``, in the order of the works and of the experts in each: what
            ``measure`` leaves and ``cast`` uses. Ranks reduce it by maximum in between.
    """

    amax: torch.Tensor

    def measure(self, stream: int | None = None) -> None:
        """Writes the largest finite magnitude of every matrix to ``amax``."""
        ...

    def cast(self, stream: int | None = None) -> None:
        """Writes values and scales from what ``amax`` holds."""
        ...


def compile_quantize(form: Format, works: Sequence[Work]) -> CompiledQuantize:
    """Compiles works to one program.

    The program keeps the addresses: where a storage moves, compile again.

    Args:
        form: The format.
        works: On one device.

    Raises:
        QuantizationError: If a tensor does not fit the format.
        LayoutError: If tensors are on several devices or have strides no kernel reads.
        EnvironmentUnsupportedError: If the GPU has no FP8 conversion or kernels cannot be built.
    """
    if form is Format.FP8_TENSOR:
        return compile_fp8_tensor(works)
    if _on_cuda(form, works):
        from weight_sync.quantize.cuda import CudaQuantize

        return CudaQuantize(form, works)
    from weight_sync.quantize.cpu import CpuQuantize

    return CpuQuantize(form, works)


def compile_fp8_tensor(works: Sequence[Work]) -> CompiledFp8Tensor:
    """:func:`compile_quantize` for ``FP8_TENSOR``, with its two steps apart."""
    if _on_cuda(Format.FP8_TENSOR, works):
        from weight_sync.quantize.cuda import CudaFp8Tensor

        return CudaFp8Tensor(Format.FP8_TENSOR, works)
    from weight_sync.quantize.cpu import CpuFp8Tensor

    return CpuFp8Tensor(Format.FP8_TENSOR, works)


def refuse_infinities(found: Mapping[str, int]) -> None:
    """Raises if any tensor holds infinities.

    Args:
        found: Infinite elements of the tensors that hold some.

    Raises:
        QuantizationError: Naming the tensors.
    """
    if found:
        listed = shorten(f"{name} ({count})" for name, count in found.items())
        raise QuantizationError(
            f"infinite weights cannot be quantized to E4M3: {listed}. The trainer has diverged; "
            "go back to a checkpoint, or leave these names unquantized"
        )


def count_by_name(works: Sequence[Work], counts: Sequence[int]) -> dict[str, int]:
    """Adds up counts that are not 0 of works with the same name.

    Args:
        works: A rank may hold several regions of one tensor.
        counts: One per work.
    """
    out: dict[str, int] = {}
    for work, count in zip(works, counts, strict=True):
        if count:
            out[work.name] = out.get(work.name, 0) + count
    return out


def _on_cuda(form: Format, works: Sequence[Work]) -> bool:
    devices = {t.device for w in works for t in (w.source, w.value, w.scale)}
    if len(devices) > 1:
        raise LayoutError(
            f"one quantize program was given tensors on {', '.join(sorted(map(str, devices)))}; "
            "compile one program per device"
        )
    for work in works:
        _check(form, work)
    kind = next(iter(devices)).type if devices else "cpu"
    if kind not in ("cpu", "cuda"):
        raise LayoutError(f"no quantize kernels for device type {kind!r}; use cpu or cuda tensors")
    return kind == "cuda"


def _check(form: Format, work: Work) -> None:
    source, value, scale = work.source, work.value, work.scale
    wanted = scale_shape(form, source.shape, work.name)
    found = str(source.dtype).removeprefix("torch.")
    if found not in SOURCE_DTYPES:
        raise QuantizationError(
            f"{work.name} is {found}, and only {' and '.join(SOURCE_DTYPES)} are quantized; leave "
            "it out, or declare a cast before"
        )
    if source.shape[-1] > 1 and source.stride(-1) != 1:
        raise LayoutError(
            f"{work.name} has stride {source.stride(-1)} along K; pass a view whose last dimension "
            "is dense, or a contiguous copy"
        )
    for part, tensor, dtype, shape in (
        ("value", value, "uint8", tuple(source.shape)),
        ("scale", scale, scale_dtype(form), wanted),
    ):
        if str(tensor.dtype) != f"torch.{dtype}" or tuple(tensor.shape) != shape:
            raise QuantizationError(
                f"the {part} of {work.name} must be {dtype} {list(shape)}, not "
                f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )
        if not tensor.is_contiguous():
            raise LayoutError(f"the {part} of {work.name} must be contiguous")
