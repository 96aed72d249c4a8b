"""Compiles quantize programs for the device that their tensors are on."""

from __future__ import annotations

from collections.abc import Sequence

from weight_sync.errors import LayoutError, QuantizationError
from weight_sync.quantize.format import SOURCE_DTYPES, Format, scale_dtype, scale_shape
from weight_sync.quantize.work import CompiledFp8Tensor, CompiledQuantize, Work


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
