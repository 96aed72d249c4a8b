"""The formats of ``format.py`` in torch, for any device; the CUDA kernels are bit-equal to it.

Infinities are counted, not refused, here: who calls knows the tensor's name (``batch.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weight_sync.errors import QuantizationError
from weight_sync.quantize.format import (
    E4M3_MAX,
    E4M3_NAN,
    E4M3_TOP_EXPONENT,
    E8M0_BIAS,
    E8M0_LEAST,
    MX_BLOCK,
    SCALE_LEAST,
    SOURCE_DTYPES,
    TILE,
    Format,
    scale_shape,
)


@dataclass(frozen=True)
class Encoded:
    """A quantized tensor.

    Attributes:
        value: uint8, the E4M3 bytes, contiguous, same shape as the input.
        scale: uint8 (MXFP8) or float32, of ``format.scale_shape``.
        infinities: int64 0-dim tensor, how many elements were infinite; not 0 means refuse.
    """

    value: torch.Tensor
    scale: torch.Tensor
    infinities: torch.Tensor


def encode(form: Format, x: torch.Tensor, amax: torch.Tensor | None = None) -> Encoded:
    """Quantizes a bf16 or float32 tensor.

    Args:
        form: The format.
        x: ``[..., N, K]``, any strides.
        amax: For ``FP8_TENSOR``, the largest finite magnitude of each whole matrix, float32
            ``[...]``, where ``x`` is only a shard of it; measured from ``x`` when left out.

    Raises:
        QuantizationError: If shape or dtype do not fit the format.
    """
    if str(x.dtype).removeprefix("torch.") not in SOURCE_DTYPES:
        raise QuantizationError(
            f"cannot quantize a {x.dtype} tensor; cast it to one of {', '.join(SOURCE_DTYPES)}"
        )
    shape = scale_shape(form, x.shape)
    if form is Format.MXFP8:
        blocks = x.float().unflatten(-1, (-1, MX_BLOCK))
        scale = _e8m0(_largest(blocks, (-1,)))
        # A power of two times a float32: exact, or so small that E4M3 rounds it to zero.
        factor = _power_of_two(2 * E8M0_BIAS - scale.int())
        value = _e4m3(blocks, factor.unsqueeze(-1)).flatten(-2)
    elif form is Format.FP8_BLOCK:
        tiles = _tiles(x.float())
        scale = _float_scale(_largest(tiles, (-3, -1)))
        value = _e4m3(tiles, scale.reciprocal()[..., :, None, :, None])
        value = value.flatten(-2).flatten(-3, -2)[..., : x.shape[-2], : x.shape[-1]]
    else:
        scale = _float_scale(finite_amax(x) if amax is None else amax)
        value = _e4m3(x.float(), scale.reciprocal()[..., None, None])
    return Encoded(value.contiguous(), scale.reshape(shape), torch.isinf(x).sum())


def finite_amax(x: torch.Tensor) -> torch.Tensor:
    """Largest finite magnitude per matrix of ``[..., N, K]``, float32 ``[...]``; 0 if none."""
    return _largest(x.float(), (-2, -1))


def decode(form: Format, value: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What an engine computes with: value times scale, float32.

    Args:
        form: The format.
        value: E4M3 bytes as uint8 or ``torch.float8_e4m3fn``, ``[..., N, K]``.
        scale: As ``encode`` returned it.

    Raises:
        QuantizationError: If value and scale do not fit together.
    """
    if tuple(scale.shape) != scale_shape(form, value.shape):
        raise QuantizationError(
            f"a {form} value of shape {tuple(value.shape)} needs a scale of shape "
            f"{scale_shape(form, value.shape)}, not {tuple(scale.shape)}; quantize both together"
        )
    numbers = value.view(torch.float8_e4m3fn).float()
    if form is Format.MXFP8:
        factor = _power_of_two(scale.int())
        return (numbers.unflatten(-1, (-1, MX_BLOCK)) * factor.unsqueeze(-1)).flatten(-2)
    if form is Format.FP8_BLOCK:
        rows, cols = value.shape[-2:]
        wide = scale.repeat_interleave(TILE, -2)[..., :rows, :]
        return numbers * wide.repeat_interleave(TILE, -1)[..., :cols]
    return numbers * scale[..., None, None]


def _largest(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    if any(x.shape[d] == 0 for d in dims):
        kept = [n for d, n in enumerate(x.shape) if d - x.ndim not in dims]
        return x.new_zeros(kept)
    return torch.where(torch.isfinite(x), x.abs(), 0.0).amax(dims)


def _e8m0(amax: torch.Tensor) -> torch.Tensor:
    # The exponent field of a float32 is floor(log2(amax)) + 127, exactly; subnormals have 0, which
    # the clamp raises anyway. No logarithm, so nothing to round.
    exponent = amax.view(torch.int32) >> 23
    return (exponent - E4M3_TOP_EXPONENT).clamp(min=E8M0_LEAST).to(torch.uint8)


def _power_of_two(biased: torch.Tensor) -> torch.Tensor:
    return (biased << 23).view(torch.float32)


def _float_scale(amax: torch.Tensor) -> torch.Tensor:
    return (amax / E4M3_MAX).clamp(min=SCALE_LEAST)


def _e4m3(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    # Clamped first: torch versions differ in whether their cast saturates.
    bounded = (x * factor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return torch.where(torch.isfinite(x), bounded.view(torch.uint8), E4M3_NAN)


def _tiles(x: torch.Tensor) -> torch.Tensor:
    rows, cols = x.shape[-2:]
    padded = torch.nn.functional.pad(x, (0, -cols % TILE, 0, -rows % TILE))
    return padded.unflatten(-1, (-1, TILE)).unflatten(-3, (-1, TILE))
