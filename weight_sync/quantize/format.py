"""The quantized formats: names, shapes, constants and the one rounding rule of each.

Everything that writes bytes (``reference.py`` and the CUDA kernels) follows this page bit by bit.

**MXFP8** (OCP Microscaling Formats v1.0, section 6.3). Blocks of 32 neighbours along the last
dimension K share one E8M0 scale byte. With ``amax`` the largest finite magnitude of the block::

    exponent = floor(log2(amax)) - 8            8 = exponent of the largest E4M3 binade, [256, 448]
    byte     = clamp(exponent + 127, 1, 254)    the scale is 2 ** (byte - 127)
    element  = E4M3(x / 2 ** (byte - 127))      to nearest, ties to even, saturating at +-448

The exponent is rounded **down**: the block maximum lands in [256, 512), and the part of that range
above 448 saturates. A block with maximum 0.96875 thus has byte 118 and decodes its maximum to
0.875. Rounding the exponent up when the maximum would saturate (byte 119, decoding to 1.0) is
another rule, which vLLM follows when it quantizes bf16 itself. Bytes of the two rules must not be
mixed, so an engine fed from here takes value and scale as sent and derives neither again.

Byte 0 is never written, because kernels exist that misread it; byte 255 is NaN and never written
either. An all-zero block, like every block with ``amax < 2 ** -117``, has byte 1 (2 ** -126, the
smallest normal float32): the clamp gives it without a special case, and it decodes to exactly 0.

**FP8 per tensor**: one float32 scale per matrix (``[N, K]`` has scale shape ``()``, ``[E, N, K]``
has ``(E,)``). **FP8 per block**: one float32 scale per 128x128 block of the last two dimensions,
smaller at the edges. In both, in float32 with every operation rounded to nearest::

    scale   = max(amax / 448, 2 ** -126)        decoding multiplies by it
    element = E4M3(x * (1 / scale))             to nearest, ties to even, saturating at +-448

**Values that are no numbers.** A NaN becomes the E4M3 NaN 0x7F and leaves the scale alone: a NaN
weight stays visible in the engine exactly where it was. E4M3 has no infinity, and neither
saturating one nor calling it NaN is what the trainer holds, so a tensor with infinities is
**refused** (the bytes written before the refusal are 0x7F). The sign of zero is kept. Subnormals
are ordinary numbers.

**Error of a decoded element** against the float32 or bf16 input ``x``; ``s`` is its decoded scale:

====================  =====================================================
``|x| / s``           error
====================  =====================================================
up to ``2 ** -6``     at most ``s * 2 ** -10`` (half an E4M3 subnormal step)
up to 448             at most ``|x| * 2 ** -4``
above 448             below ``|x| * 2 ** -3`` (MXFP8 only: saturation)
====================  =====================================================

For the two float32-scaled formats add ``|x| * 2 ** -22`` for the rounding of the scale, and
``2 ** -149`` for decoding to subnormal float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from weight_sync.errors import QuantizationError

MX_BLOCK = 32
TILE = 128
E4M3_MAX = 448.0
E4M3_NAN = 0x7F
E4M3_TOP_EXPONENT = 8
E8M0_BIAS = 127
E8M0_LEAST = 1
SCALE_LEAST = 2.0**-126
VALUE_DTYPE = "float8_e4m3fn"
SOURCE_DTYPES = ("bfloat16", "float32")


class Format(StrEnum):
    """A quantized format that trainer and engine can agree on."""

    MXFP8 = "mxfp8"
    FP8_TENSOR = "fp8_tensor"
    FP8_BLOCK = "fp8_block"


_SCALE_SUFFIX = {
    Format.MXFP8: "_scale",
    Format.FP8_TENSOR: "_scale",
    Format.FP8_BLOCK: "_scale_inv",
}
# The engines that keep a canonical copy beside their shuffled scales load that copy by this suffix.
SCALE_SUFFIXES = ("_scale", "_scale_inv", "_scale_from_checkpoint")


def scale_suffix(form: Format) -> str:
    """What follows a value's name in its scale's name, unless the engine asks for another."""
    return _SCALE_SUFFIX[form]


def scale_dtype(form: Format) -> str:
    """torch dtype name of the scale as it travels."""
    return "uint8" if form is Format.MXFP8 else "float32"


def block_of(form: Format) -> tuple[int, int] | None:
    """Rows and columns that share a scale, or None where a whole matrix does."""
    return {Format.MXFP8: (1, MX_BLOCK), Format.FP8_BLOCK: (TILE, TILE)}.get(form)


def scale_shape(form: Format, shape: Sequence[int], name: str = "the tensor") -> tuple[int, ...]:
    """Shape of the scale of a value of shape ``[..., N, K]``.

    Args:
        form: The format.
        shape: Shape of the value; leading dimensions (experts) are kept.
        name: For the message.

    Raises:
        QuantizationError: If the format cannot hold the shape.
    """
    if len(shape) < 2:
        raise QuantizationError(
            f"{name} has shape {tuple(shape)}; {form} needs a matrix [..., N, K]. Leave vectors "
            "unquantized"
        )
    *lead, rows, cols = shape
    if form is Format.FP8_TENSOR:
        return tuple(lead)
    if form is Format.FP8_BLOCK:
        return (*lead, -(-rows // TILE), -(-cols // TILE))
    if cols % MX_BLOCK:
        raise QuantizationError(
            f"{name} has K = {cols}, no multiple of the MXFP8 block of {MX_BLOCK}. Leave it "
            f"unquantized or pad K to {-(-cols // MX_BLOCK) * MX_BLOCK} in trainer and engine"
        )
    return (*lead, rows, cols // MX_BLOCK)
