"""Swaps vLLM modules between kernel layout (live) and loading layout (what loaders write).

vLLM remembers each module's loading layout as meta tensors when it builds a model. The helpers here
use that memory for one module or for all, unwrap the buffering loaders of vLLM's own reload, and
always put the live tensors back under their old addresses, also after an error: vLLM itself has no
abort.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import (
    SKIP_TENSORS,
    materialize_layer,
    restore_layer_on_meta,
)
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from weight_sync.vllm.methods import KV_SCALES, takes_kv_scales
from weight_sync.worker.model import UnitView


@dataclass(frozen=True)
class LiveTensors:
    """What a module held before a swap."""

    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    non_persistent: frozenset[str]

    def all(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by attribute name."""
        return self.parameters | self.buffers


def live_tensors(module: torch.nn.Module) -> LiveTensors:
    """The module's own parameters and buffers (not those of children)."""
    return LiveTensors(
        {n: p for n, p in module._parameters.items() if p is not None},
        {n: b for n, b in module._buffers.items() if b is not None},
        frozenset(module._non_persistent_buffers_set),
    )


def place(module: torch.nn.Module, live: LiveTensors) -> None:
    """Puts live tensors back; whatever the module holds now is dropped."""
    for name in [*module._parameters, *module._buffers]:
        if getattr(module, name, None) is not None:
            delattr(module, name)
    for name, parameter in live.parameters.items():
        module.register_parameter(name, cast("torch.nn.Parameter", parameter))
    for name, buffer in live.buffers.items():
        module.register_buffer(name, buffer, persistent=name not in live.non_persistent)


def unwrapped_loader(tensor: torch.Tensor) -> Callable[..., object]:
    """The loader under any of vLLM's buffering wrappers."""
    loader = getattr(tensor, "weight_loader", default_weight_loader)
    while getattr(loader, "__name__", "") == "online_process_loader":
        loader = loader.__wrapped__
    return loader


def unwrap_loaders(module: torch.nn.Module) -> None:
    """Makes the module's tensors load at once instead of being buffered by vLLM."""
    for tensor in live_tensors(module).all().values():
        if hasattr(tensor, "weight_loader"):
            tensor.weight_loader = unwrapped_loader(tensor)


def to_loading_layout(module: torch.nn.Module) -> None:
    """Swaps one module to storage-less tensors in loading layout."""
    restore_layer_on_meta(module, get_layerwise_info(module))
    unwrap_loaders(module)
    if takes_kv_scales(module):
        _keep_float32(module)


def _keep_float32(module: torch.nn.Module) -> None:
    """vLLM makes cache scales in the model's dtype, and would round what a trainer calibrated."""
    for name in KV_SCALES:
        held = module._parameters.get(name)
        if held is not None:
            wide = held.data.to(torch.float32)
            wide.__class__ = held.__class__
            wide.__dict__ = held.__dict__.copy()
            module._parameters[name] = cast("torch.nn.Parameter", wide)


def materialize(module: torch.nn.Module, live: LiveTensors) -> None:
    """Gives a module in loading layout real memory.

    Values that loaders do not write must not be garbage: a tensor that keeps its shape starts as a
    copy of the live one, everything else (padding) starts at zero.
    """
    materialize_layer(module, get_layerwise_info(module))
    old = live.all()
    for name, tensor in live_tensors(module).all().items():
        before = old.get(name)
        if tensor is before and name in SKIP_TENSORS and name == "bias":
            # vLLM leaves biases live during a reload; here nothing live may change before commit.
            fresh = torch.empty_like(tensor.data)
            fresh.__class__ = tensor.__class__
            fresh.__dict__ = tensor.__dict__.copy()
            delattr(module, name)
            module.register_parameter(name, cast("torch.nn.Parameter", fresh))
            tensor = fresh
        if tensor is before:
            continue
        if before is not None and before.shape == tensor.shape and before.dtype == tensor.dtype:
            tensor.data.copy_(before.data)
        else:
            tensor.data.zero_()
    unwrap_loaders(module)


class VllmLoadingView:
    """The whole model in loading layout; see :class:`weight_sync.worker.model.LoadingView`."""

    def __init__(
        self, model: torch.nn.Module, units: Iterable[tuple[str, torch.nn.Module]]
    ) -> None:
        self._model = model
        self.units = tuple(
            UnitView(
                name,
                live_tensors(module).all(),
                frozenset(live_tensors(module).buffers)
                | SKIP_TENSORS - {"bias", "e_score_correction_bias"}
                | (frozenset(KV_SCALES) if takes_kv_scales(module) else frozenset()),
            )
            for name, module in units
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Runs the model's own ``load_weights``."""
        cast("Any", self._model).load_weights(weights)


@contextmanager
def loading_view(model: torch.nn.Module) -> Iterator[VllmLoadingView]:
    """All modules in loading layout on meta; live tensors come back on exit."""
    modules = list(model.named_modules())
    saved = [(module, live_tensors(module)) for _, module in modules]
    flags: Any = model
    torchao = getattr(model, "_do_torchao_reload", False)
    try:
        flags._do_torchao_reload = False
        for module, _ in saved:
            to_loading_layout(module)
        yield VllmLoadingView(model, modules)
    finally:
        flags._do_torchao_reload = torchao
        for module, live in saved:
            place(module, live)
