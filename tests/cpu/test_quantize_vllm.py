"""What the real vLLM makes of the bytes."""

from __future__ import annotations

import pytest
import torch
from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (
    dequant_mxfp8_to_bf16,
    mxfp8_e4m3_quantize,
)

from weight_sync.quantize.format import Format
from weight_sync.quantize.reference import decode, encode


@pytest.mark.parametrize("shape", [(16, 64), (4, 8, 96), (3, 32)])
def test_vllm_decodes_mxfp8_as_we_do(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    x[..., :1, :] = 0
    encoded = encode(Format.MXFP8, x)
    theirs = dequant_mxfp8_to_bf16(encoded.value.view(torch.float8_e4m3fn), encoded.scale)
    ours = decode(Format.MXFP8, encoded.value, encoded.scale)
    # Four significant bits: bf16 holds every decoded value exactly.
    assert torch.equal(theirs.float(), ours)


def test_vllm_quantizing_bf16_itself_rounds_the_exponent_up_where_we_saturate() -> None:
    x = torch.full((1, 32), 0.5, dtype=torch.bfloat16)
    x[0, 0] = 0.96875
    _, scale = mxfp8_e4m3_quantize(x)
    assert scale.tolist() == [[119]]
    assert encode(Format.MXFP8, x).scale.tolist() == [[118]]


def test_vllm_and_we_agree_where_the_largest_of_a_block_does_not_saturate() -> None:
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(16, 64, generator=generator) + 0.5).clamp(max=1.25).bfloat16()
    x[:, ::32] = 1.5
    value, scale = mxfp8_e4m3_quantize(x)
    encoded = encode(Format.MXFP8, x)
    assert torch.equal(scale, encoded.scale)
    assert torch.equal(value.view(torch.uint8), encoded.value)
