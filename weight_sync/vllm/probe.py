"""Decides by experiment whether bytes may go straight into a module's live storage.

One module of every kind (class, quant method, dtypes, shapes, strides) is loaded with a known
pattern through vLLM's own post-processing. If every tensor comes out as it went in and nothing else
of the module was derived from it, the live layout is the loading layout and the kind is *direct*.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable

import torch
from vllm.config import VllmConfig

from weight_sync.vllm.loading import live_tensors, materialize, place, to_loading_layout
from weight_sync.vllm.methods import quant_method
from weight_sync.vllm.process import run_post_load
from weight_sync.worker.model import Mode

_SIMPLE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def kind_of(module: torch.nn.Module, loading: dict[str, torch.Tensor]) -> Hashable:
    """Modules of equal kind are processed alike."""
    live = live_tensors(module).all()
    method = quant_method(module)

    def layout(tensors: dict[str, torch.Tensor]) -> tuple[Hashable, ...]:
        return tuple(
            (n, t.dtype, tuple(t.shape), tuple(t.stride())) for n, t in sorted(tensors.items())
        )

    return type(module), type(method), layout(live), layout(loading)


def layout_difference(module: torch.nn.Module, loading: dict[str, torch.Tensor]) -> str:
    """Why live and loading layout differ at a glance, or empty."""
    live = live_tensors(module).all()
    for name, tensor in loading.items():
        now = live.get(name)
        if now is None:
            return f"{name} does not exist after loading"
        if (now.dtype, now.shape, now.stride()) != (tensor.dtype, tensor.shape, tensor.stride()):
            return (
                f"{name} is {now.dtype} {list(now.shape)} live but "
                f"{tensor.dtype} {list(tensor.shape)} for loaders"
            )
    return ""


def probe_module(module: torch.nn.Module, config: VllmConfig) -> Mode:
    """Loads a pattern into one module and looks at what became of it; live state is untouched."""
    method = quant_method(module)
    if method is None:
        return Mode("direct")
    live = live_tensors(module)
    saved = [(holder, dict(holder.__dict__)) for holder in (module, method)]
    registries = {k: dict(module.__dict__[k]) for k in ("_parameters", "_buffers", "_modules")}
    try:
        to_loading_layout(module)
        materialize(module, live)
        before = {n: t for n, t in live_tensors(module).all().items()}
        wanted = {}
        for name, tensor in before.items():
            if name in live.parameters:
                _fill_pattern(tensor)
            wanted[name] = tensor.detach().clone()
        run_post_load(module, config)
        after = live_tensors(module).all()
        for name, want in wanted.items():
            got = after.get(name)
            if got is None or got.shape != want.shape or got.dtype != want.dtype:
                return Mode("processed", f"{name} is repacked after loading")
            if not torch.equal(_bits(got), _bits(want)):
                return Mode("processed", f"{name} is rewritten after loading")
        known = {t.untyped_storage().data_ptr() for t in after.values()}
        for holder, attributes in saved:
            for name, value in vars(holder).items():
                if name in registries or name in after or attributes.get(name) is value:
                    continue
                derived = _derived_from(value, known, depth=4)
                if derived:
                    return Mode("processed", f"{name} is derived after loading ({derived})")
        return Mode("direct")
    finally:
        place(module, live)
        for holder, attributes in saved:
            for name in list(holder.__dict__):
                if name not in attributes:
                    del holder.__dict__[name]
            for name, value in attributes.items():
                if name not in registries and name != "_non_persistent_buffers_set":
                    holder.__dict__[name] = value


def _fill_pattern(tensor: torch.Tensor) -> None:
    """Distinct small values wherever the dtype allows, so that any permutation shows."""
    data = tensor.data
    count = torch.arange(data.numel(), device=data.device, dtype=torch.int64)
    values = ((count * 37 + count // 251) % 251 - 125).reshape(data.shape)
    data.copy_(
        (values.to(torch.float32) / 64).to(data.dtype) if data.is_floating_point() else values
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _derived_from(value: object, known: set[int], depth: int) -> str:
    """Names what in ``value`` may hold a copy of the weights; empty if nothing does."""
    if isinstance(value, _SIMPLE):
        return ""
    if isinstance(value, torch.Tensor):
        return "" if value.untyped_storage().data_ptr() in known else "a tensor of its own"
    if isinstance(value, functools.partial) or hasattr(value, "__closure__"):
        return "a function that may have packed them"
    if depth == 0:
        return ""
    if isinstance(value, dict):
        children = list(value.values())
    elif isinstance(value, list | tuple | set | frozenset):
        children = list(value)
    else:
        children = list(getattr(value, "__dict__", {}).values())
    for child in children:
        derived = _derived_from(child, known, depth - 1)
        if derived:
            return derived
    return ""
