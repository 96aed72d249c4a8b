"""Installs one module the way vLLM does after loading, without moving a live address."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from vllm.config import ModelConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from weight_sync.errors import EngineStateError
from weight_sync.vllm.addresses import HeldTensors
from weight_sync.vllm.loading import (
    LiveTensors,
    live_tensors,
    materialize,
    place,
    to_loading_layout,
)
from weight_sync.vllm.methods import quant_method


def run_post_load(module: torch.nn.Module, vllm_config: VllmConfig) -> None:
    """Runs what vLLM runs on one module after loading it.

    ``_already_called...`` guards second passes and a CPU MoE layer that kept its kernel would skip
    packing, so both are reset first.
    """
    method = quant_method(module)
    if method is None:
        return
    if hasattr(module, "_already_called_process_weights_after_loading"):
        del module._already_called_process_weights_after_loading
    if (
        getattr(method, "moe_kernel", None) is not None
        and vllm_config.device_config.device_type == "cpu"
    ):
        method.moe_kernel = None
    model = vllm_config.model_config
    dtype = torch.get_default_dtype() if model is None else model.dtype
    with torch.no_grad(), set_current_vllm_config(vllm_config), _default_dtype(dtype):
        method.process_weights_after_loading(module)
        if hasattr(module, "update_param_tp_status"):
            cast("Any", module).update_param_tp_status()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What vLLM sets while it loads; some methods make their scales in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class VllmUnitInstall:
    """One module between its first byte and its commit."""

    def __init__(self, module: torch.nn.Module, model: torch.nn.Module, config: VllmConfig) -> None:
        self._module = module
        self._model = model
        self._config = config
        self._live: LiveTensors | None = live_tensors(module)
        self._held = HeldTensors(module)
        try:
            to_loading_layout(module)
            materialize(module, self._live)
        except BaseException:
            self.abort()
            raise
        self._loaded: frozenset[str] = frozenset()

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Materialized tensors in loading layout."""
        return live_tensors(self._module).all()

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Runs the model's loaders over whole tensors that concern only this module."""
        with torch.no_grad(), set_current_vllm_config(self._config):
            cast("Any", self._model).load_weights(weights)

    def finish(self) -> None:
        """Post-processes, copies results into the live tensors and puts those back."""
        assert self._live is not None
        module, live = self._module, self._live
        run_post_load(module, self._config)
        results = live_tensors(module).all()
        for name, old in live.all().items():
            new = results.get(name)
            if name in live.non_persistent or new is old:
                continue
            if new is None:
                if name in live.buffers:
                    continue
                raise EngineStateError(
                    f"{type(module).__name__}.{name}: processing made no such parameter, but the "
                    "engine computes with one; this layer cannot be refitted in place, reload the "
                    "engine from disk"
                )
            if new.shape != old.shape or new.dtype != old.dtype:
                raise EngineStateError(
                    f"{type(module).__name__}.{name}: processing gave {new.dtype} "
                    f"{list(new.shape)} where the engine holds {old.dtype} {list(old.shape)}; "
                    "this layer cannot be refitted in place, reload the engine from disk"
                )
            old.data.copy_(new.data)
        place(module, live)
        self._held.keep()
        get_layerwise_info(module).reset()
        self._live = None

    def abort(self) -> None:
        """Puts the live tensors back."""
        if self._live is not None:
            place(self._module, self._live)
            self._held.restore()
            get_layerwise_info(self._module).reset()
            self._live = None


def refresh_attention(module: torch.nn.Module, config: ModelConfig) -> None:
    """Recomputes what an attention layer derived from its projections (MLA), in place."""
    held = HeldTensors(module)
    with torch.no_grad():
        cast("Any", module).process_weights_after_loading(config.dtype)
    held.keep()
