"""Checkpoints that a trainer's weights give when they are quantized before they are saved.

The oracle of every test of quantized engines, and what their first weights are read from. Values
come from the reference in ``weight_sync/quantize/reference.py``; names, layout and configuration
are those vLLM reads: ModelOpt's for MXFP8, vLLM's and DeepSeek's own for FP8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from bench.models import Config, shapes, write_checkpoint
from weight_sync.quantize.format import TILE, Format, scale_suffix
from weight_sync.quantize.reference import encode

# As the command line says it.
FORMATS = {"mxfp8": Format.MXFP8, "fp8": Format.FP8_BLOCK, "fp8-tensor": Format.FP8_TENSOR}


def is_quantized(name: str) -> bool:
    """Whether these checkpoints hold a tensor quantized: the matrices of all projections."""
    return name.endswith("_proj.weight")


def quantized_config(cfg: Config, form: Format) -> Config:
    """A model's configuration with what makes vLLM load it as quantized."""
    kept = [
        n.removesuffix(".weight") for n, s in shapes(cfg) if len(s) == 2 and not is_quantized(n)
    ]
    if form is Format.MXFP8:
        # ModelOpt's entries match as substrings too, so routers ("...mlp.gate") must be patterns,
        # or they would keep "...mlp.gate_up_proj" unquantized.
        ignore = [n if n.endswith(("lm_head", "embed_tokens")) else f"*{n[5:]}" for n in kept]
        quantization: dict[str, object] = {
            "quant_method": "modelopt",
            "quant_algo": "MXFP8",
            "ignore": ignore,
        }
    else:
        quantization = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "ignored_layers": kept,
        }
        if form is Format.FP8_BLOCK:
            quantization["weight_block_size"] = [TILE, TILE]
    return {**cfg, "quantization_config": quantization}


def quantize_weights(
    weights: Mapping[str, torch.Tensor], form: Format
) -> Iterator[tuple[str, torch.Tensor]]:
    """Checkpoint tensors: values and scales of projections, everything else as it is."""
    for name, tensor in weights.items():
        if not is_quantized(name):
            yield name, tensor
            continue
        encoded = encode(form, tensor)
        yield name, encoded.value.view(torch.float8_e4m3fn)
        yield name + scale_suffix(form), encoded.scale


def write_quantized(
    cfg: Config, weights: Mapping[str, torch.Tensor], form: Format, folder: Path
) -> Path:
    """Writes a quantized checkpoint."""
    return write_checkpoint(
        quantized_config(cfg, form), dict(quantize_weights(weights, form)), folder
    )
