"""The objects that post-process vLLM's modules after loading."""

from __future__ import annotations

import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod

# What an attention layer loads for a quantized cache, and has as buffers with "_" before the name.
KV_SCALES = ("q_scale", "k_scale", "v_scale", "prob_scale")


def quant_method(module: torch.nn.Module) -> QuantizeMethodBase | None:
    """The object that repacks the module after loading, if it has one."""
    method = getattr(module, "quant_method", None)
    return method if isinstance(method, QuantizeMethodBase) else None


def takes_kv_scales(module: torch.nn.Module) -> bool:
    """Whether the module is an attention layer that loads scales of its cache."""
    return isinstance(quant_method(module), BaseKVCacheMethod)
