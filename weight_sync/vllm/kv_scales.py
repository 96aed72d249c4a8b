"""Scales of an FP8 KV cache: they arrive like weights but live as buffers and host numbers.

vLLM registers them as parameters only while it loads, with -1 for "not in the checkpoint". A refit
may bring all of them, some, or none: those it does not bring keep the value the engine has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch

from weight_sync.errors import QuantizationError
from weight_sync.quantize.kv_cache import check_kv_scales
from weight_sync.vllm.methods import KV_SCALES, quant_method


class KvScaleInstall:
    """The scales of one attention layer between their first byte and their commit."""

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._module = module
        self._method = cast("Any", quant_method(module))
        self._method.create_weights(module)
        for name in KV_SCALES:
            held = getattr(module, f"_{name}").detach().reshape(()).to(device, torch.float32)
            setattr(module, name, torch.nn.Parameter(held.clone(), requires_grad=False))

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Float32 scalars by attribute name."""
        return {name: getattr(self._module, name) for name in KV_SCALES}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Scales are copied as they are; no loader of theirs needs whole tensors.

        Raises:
            QuantizationError: Always; the engine's loaders compute new values from theirs.
        """
        raise QuantizationError(
            f"{type(self._module).__name__} computes its KV-cache scales while loading "
            f"{', '.join(name for name, _ in weights)}; leave them out and calibrate in the engine"
        )

    def finish(self) -> None:
        """Lets vLLM take over the scales, on device and host, at the addresses they have.

        Raises:
            QuantizationError: If a scale is not a positive finite number; nothing was changed.
        """
        check_kv_scales({name: float(tensor) for name, tensor in self.tensors.items()})
        with torch.no_grad():
            self._method.process_weights_after_loading(self._module)

    def abort(self) -> None:
        """Drops what came; the engine keeps its scales."""
        for name in KV_SCALES:
            if name in self._module._parameters:
                delattr(self._module, name)
