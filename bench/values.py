"""Weights that depend only on a tensor's name, a version and an element's place in the tensor.

However ranks cut a tensor, each makes its own part, and replicas agree bit by bit: also between the
CPU and GPUs, because only integers and exact floats take part. Values look like those of a model:
uniform over 1/16 around 0, or around 1 for norms. Making them takes many small kernels for each
tensor, so the next version's are made of this one's, by flipping bits that keep their size.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod

import torch

from bench.models import Config, shapes
from weight_sync.layout import contiguous_strides

# Elements made at once, which bounds the memory for it.
_BLOCK = 1 << 24
_MIX = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35)
# Odd, so that versions of a run differ; of each there are 256 kinds of values.
_STEP, _KINDS = 37, 256


def fill(
    target: torch.Tensor, name: str, shape: Sequence[int], offset: Sequence[int], version: int
) -> None:
    """Writes a region of a tensor.

    Args:
        target: The region's elements, in any layout; float.
        name: Checkpoint name.
        shape: Shape of the whole tensor.
        offset: Where the region begins in it.
        version: Which values.
    """
    norm = _is_norm(name)
    seed = zlib.crc32((f"{version} {name}" if norm else name).encode())
    mean = 1.0 if norm else 0.0
    strides = contiguous_strides(tuple(shape))
    rows = max(1, _BLOCK // max(1, prod(target.shape[1:])))
    for first in range(0, target.shape[0], rows):
        block = target[first : first + rows]
        start = (offset[0] + first, *offset[1:])
        hashed = _index(block, start, strides).mul_(_signed(_MIX[0])).add_(_signed(seed))
        for shift, factor in ((15, _MIX[1]), (13, _MIX[2])):
            hashed.bitwise_xor_(hashed >> shift).mul_(_signed(factor))
        # 24 bits are exact in float32, and so is a power of two times them.
        block.copy_((hashed >> 8).to(torch.float32).mul_(2.0**-28).add_(mean))
    if not norm:
        _flip(target, _kind(name, version))


def change(
    target: torch.Tensor,
    name: str,
    shape: Sequence[int],
    offset: Sequence[int],
    versions: tuple[int, int],
) -> None:
    """As :func:`fill`, of a region that holds the values of the first version, to the second's."""
    before, after = versions
    if _is_norm(name):
        # There are few of them, and their size says too little about their bits.
        fill(target, name, shape, offset, after)
    else:
        _flip(target, _kind(name, before) ^ _kind(name, after))


def _is_norm(name: str) -> bool:
    return name.endswith("norm.weight")


def _kind(name: str, version: int) -> int:
    return (version * _STEP + zlib.crc32(name.encode())) % _KINDS


def _flip(target: torch.Tensor, bits: int) -> None:
    """Flips the sign, and the highest seven bits after the exponent."""
    whole, fraction = (torch.int16, 7) if target.dtype == torch.bfloat16 else (torch.int32, 23)
    sign = torch.iinfo(whole).min if bits >> 7 else 0
    target.view(whole).bitwise_xor_(sign | (bits & 0x7F) << (fraction - 7))


def whole(cfg: Config, version: int) -> dict[str, torch.Tensor]:
    """All tensors of a model in bf16, on the host."""
    out = {}
    for name, shape in shapes(cfg):
        out[name] = torch.empty(shape, dtype=torch.bfloat16)
        fill(out[name], name, shape, (0,) * len(shape), version)
    return out


def _index(block: torch.Tensor, start: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
    """int32, shaped like ``block``: each element's place in the whole tensor, modulo 2**32."""
    index = torch.zeros((), dtype=torch.int32, device=block.device)
    for dim, (begin, stride) in enumerate(zip(start, strides, strict=True)):
        steps = torch.arange(block.shape[dim], dtype=torch.int32, device=block.device)
        along = steps.mul_(_signed(stride)).add_(_signed(begin * stride))
        index = index + along.reshape(-1, *(1,) * (block.dim() - dim - 1))
    return index.contiguous()


def _signed(value: int) -> int:
    """The int32 with the same low 32 bits."""
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)
