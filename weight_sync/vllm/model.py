"""vLLM's model in a running worker, as the engine side of a refit sees it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from weight_sync.vllm.addresses import HeldTensors
from weight_sync.vllm.kv_scales import KvScaleInstall
from weight_sync.vllm.loading import (
    VllmLoadingView,
    live_tensors,
    loading_view,
)
from weight_sync.vllm.methods import takes_kv_scales
from weight_sync.vllm.probe import kind_of, layout_difference, probe_module
from weight_sync.vllm.process import VllmUnitInstall, refresh_attention, run_post_load
from weight_sync.worker.model import Mode, UnitInstall


class VllmModel:
    """Implements :class:`weight_sync.worker.model.EngineModel` for a vLLM worker's model."""

    def __init__(
        self, model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device
    ) -> None:
        self._model = model
        self._config = vllm_config
        self._device = device
        self._modules = dict(model.named_modules())
        self._modes: dict[str, Mode] = {}
        self._shared: dict[str, str] | None = None
        self._absorbing = [n for n, m in self._modules.items() if _absorbs_projections(m)]

    @property
    def device(self) -> torch.device:
        """Device of the live parameters."""
        return self._device

    @contextmanager
    def loading_view(self) -> Iterator[VllmLoadingView]:
        """All parameters on meta in loading layout."""
        with set_current_vllm_config(self._config), loading_view(self._model) as view:
            yield view

    def shared_with(self) -> dict[str, str]:
        """Units whose live tensors are those of an earlier unit (tied weights): name -> owner."""
        if self._shared is None:
            self._shared = self._find_shared()
        return self._shared

    def _find_shared(self) -> dict[str, str]:
        owner: dict[int, str] = {}
        shared: dict[str, str] = {}
        for name, module in self._modules.items():
            for tensor in live_tensors(module).parameters.values():
                if tensor.numel() == 0 or tensor.is_meta:
                    continue
                first = owner.setdefault(tensor.data_ptr(), name)
                if first != name:
                    shared[name] = first
        return shared

    def _has_nothing_of_its_own(self, unit: str, owner: str) -> bool:
        owned = {t.data_ptr() for t in live_tensors(self._modules[owner]).parameters.values()}
        mine = live_tensors(self._modules[unit]).parameters.values()
        return all(t.data_ptr() in owned for t in mine if t.numel())

    def probe(self, units: Iterable[str]) -> dict[str, Mode]:
        """Modes of the named units; one experiment per kind of module."""
        modes: dict[str, Mode] = {}
        by_kind: dict[object, Mode] = {}
        with set_current_vllm_config(self._config):
            for name in units:
                module = self._modules[name]
                if takes_kv_scales(module):
                    modes[name] = Mode("processed", "scales are kept on device and host")
                    continue
                loading = self._loading_tensors(module)
                difference = layout_difference(module, loading)
                if difference:
                    modes[name] = Mode("processed", difference)
                    continue
                kind = kind_of(module, loading)
                if kind not in by_kind:
                    by_kind[kind] = probe_module(module, self._config)
                modes[name] = by_kind[kind]
        self._modes.update(modes)
        return modes

    def _loading_tensors(self, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        parameters, _ = get_layerwise_info(module).restore_metadata
        return dict(parameters)

    def live(self, unit: str) -> Mapping[str, torch.Tensor]:
        """Live tensors of one unit."""
        return _Live(self._modules[unit])

    def begin(self, unit: str) -> UnitInstall:
        """Starts a processed or loader install."""
        module = self._modules[unit]
        if takes_kv_scales(module):
            return KvScaleInstall(module, self._device)
        return VllmUnitInstall(module, self._model, self._config)

    def refresh_derived(self, units: Iterable[str]) -> None:
        """Re-derives what other modules made from the installed units.

        A tied head that packs its own copy (CPU) is processed again from the shared live tensor,
        and attention layers that absorbed projections (MLA) absorb them again. A module that shares
        only some of its tensors (experts with the router's bias) is installed itself: its own
        tensors are no longer in loading layout and must not be processed twice.
        """
        installed = set(units)
        for name, owner in self.shared_with().items():
            if owner in installed and self._has_nothing_of_its_own(name, owner):
                if name not in self._modes:
                    self.probe([name])
                if self._modes[name].name != "direct":
                    held = HeldTensors(self._modules[name])
                    run_post_load(self._modules[name], self._config)
                    held.keep()
        for name in self._absorbing:
            if any(u.startswith(f"{name}.") for u in installed):
                with set_current_vllm_config(self._config):
                    refresh_attention(self._modules[name], self._config.model_config)


class _Live(Mapping[str, torch.Tensor]):
    """A module's own parameters and buffers, whatever they are when one is asked for."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def __getitem__(self, name: str) -> torch.Tensor:
        # Asked of every tensor in every refit, so without a dict of all of them.
        tensor: torch.Tensor | None = self._module._parameters.get(name)
        if tensor is None:
            tensor = self._module._buffers.get(name)
        if tensor is None:
            raise KeyError(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        own = (*self._module._parameters.items(), *self._module._buffers.items())
        return iter([name for name, tensor in own if tensor is not None])

    def __len__(self) -> int:
        return len(list(iter(self)))


def _absorbs_projections(module: torch.nn.Module) -> bool:
    """True for attention layers that keep matrices derived from their projections."""
    return hasattr(module, "W_UV") or hasattr(module, "W_UK_T") or hasattr(module, "W_K")
