"""Layers whose quant methods keep what they derive inside kernel objects that they make anew.

As with a captured CUDA graph, what computes keeps the very tensor it saw when the engine started:
a refit has to fill that one, whatever the method holds afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace as Held
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from tests.harness.vllm_layers import Method, Model, parameter
from weight_sync.vllm.model import VllmModel

SIZE = 8


@dataclass(frozen=True)
class Frozen:
    packed: torch.Tensor


class Slots:
    __slots__ = ("packed",)

    def __init__(self, packed: torch.Tensor) -> None:
        self.packed = packed


def _moe(layer: Any, packed: torch.Tensor) -> None:
    """The depth of vLLM's experts: kernel, implementation, experts, config, descriptor, scale."""
    config = Held(_w1=Held(scale=packed))
    layer.quant_method.moe_kernel = Held(impl=Held(fused_experts=Held(quant_config=config)))


def _attribute(layer: Any, packed: torch.Tensor) -> None:
    layer.quant_method.kernel = Held(packed=packed)


def _frozen(layer: Any, packed: torch.Tensor) -> None:
    layer.quant_method.kernel = Frozen(packed)


def _slots(layer: Any, packed: torch.Tensor) -> None:
    layer.quant_method.kernel = Slots(packed)


def _items(layer: Any, packed: torch.Tensor) -> None:
    layer.kernels = [{"packed": packed}]


def _closure(layer: Any, packed: torch.Tensor) -> None:
    layer.compute = lambda: packed


def _partial(layer: Any, packed: torch.Tensor) -> None:
    layer.compute = functools.partial(Held, packed=packed)


def _tuple(layer: Any, packed: torch.Tensor) -> None:
    layer.quant_method.kernel = (packed,)


# How a kernel is made, and what it computes with.
Make, Read = Callable[[Any, torch.Tensor], None], Callable[[Any], torch.Tensor]
KINDS: dict[str, tuple[Make, Read]] = {
    "attribute": (_attribute, lambda m: m.quant_method.kernel.packed),
    "moe": (_moe, lambda m: m.quant_method.moe_kernel.impl.fused_experts.quant_config._w1.scale),
    "frozen": (_frozen, lambda m: m.quant_method.kernel.packed),
    "slots": (_slots, lambda m: m.quant_method.kernel.packed),
    "items": (_items, lambda m: m.kernels[0]["packed"]),
    "closure": (_closure, lambda m: m.compute()),
    "partial": (_partial, lambda m: m.compute.keywords["packed"]),
    "tuple": (_tuple, lambda m: m.quant_method.kernel[0]),
}


class _Layer:
    """One running layer."""

    def __init__(self, kind: str, config: VllmConfig) -> None:
        self.make, self.read = KINDS[kind]
        self.trouble = ""
        layer = torch.nn.Module()
        layer.weight = parameter(SIZE)
        layer.quant_method = Method(self._process)
        self.model = Model(layer=layer)
        record_metadata_for_reloading(self.model)
        layer.quant_method.process_weights_after_loading(layer)
        self.layer: Any = layer
        self.graph = self.read(layer)
        self.vllm = VllmModel(self.model, config, torch.device("cpu"))

    def _process(self, layer: Any) -> None:
        self.make(layer, layer.weight.data * 2)
        if self.trouble == "fails":
            raise RuntimeError("kernel said no")
        if self.trouble == "drops the parameter":
            del layer.weight
        if self.trouble == "drops the kernel":
            layer.quant_method.kernel = None
        if self.trouble == "changes the shape":
            self.make(layer, torch.zeros(2 * SIZE))


class NestedWorker:
    """All of them, in one process."""

    def __init__(self) -> None:
        self._config = VllmConfig()
        self._config.model_config = Held(dtype=torch.float32)  # Only its dtype is asked for.
        self._layers: dict[str, _Layer] = {}

    def refit(self, kind: str, value: float, trouble: str = "") -> tuple[list[float], bool]:
        """Installs a weight; what the graph reads, and whether the kernel reads the same memory."""
        with set_current_vllm_config(self._config):
            if kind not in self._layers:
                self._layers[kind] = _Layer(kind, self._config)
            one = self._layers[kind]
            one.trouble = trouble
            install = one.vllm.begin("layer")
            try:
                install.tensors["weight"].fill_(value)
                install.finish()
            except BaseException:
                install.abort()
                raise
        return one.graph.tolist(), one.read(one.layer) is one.graph

    def refit_two(self) -> tuple[list[float], bool]:
        """Installs two layers at once, of which one refers to the other.

        Returns:
            The other's weight, and whether it lies where it lay.
        """
        with set_current_vllm_config(self._config):
            first, second = _Layer("attribute", self._config), _Layer("attribute", self._config)
            second.layer.neighbours = [first.layer]
            live = first.layer.weight
            installs = [one.vllm.begin("layer") for one in (first, second)]
            for install in installs:
                install.tensors["weight"].fill_(1.0)
                install.finish()
        return first.layer.weight.tolist(), first.layer.weight is live
