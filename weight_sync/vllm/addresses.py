"""Keeps tensors where kernels and CUDA graphs know them, wherever a module keeps them.

Quant methods leave what they derive (packed weights, products of scales) in plain attributes of the
module, in the method, and in kernel objects that they make anew. None of it is a parameter or a
buffer, yet a captured graph holds its address all the same.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from weight_sync.errors import EngineStateError
from weight_sync.vllm.methods import quant_method

# vLLM's deepest are method.kernel.impl.experts.config.descriptor.scale.
_DEPTH = 7
_LEAVES = (
    bool,
    int,
    float,
    str,
    bytes,
    type(None),
    type,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    types.ModuleType,
    types.BuiltinFunctionType,
)
# Packages whose objects hold no weights of a module, but lead to everything else.
_ELSEWHERE = ("vllm.config", "vllm.distributed", "transformers", "torch.distributed")
_MODULE_OWN = frozenset(vars(torch.nn.Module()))
_TENSORS = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class _Step:
    """From an object to one that it holds: an attribute, an item, or a variable of a function."""

    kind: str
    key: Any

    def __str__(self) -> str:
        return f".{self.key}" if self.kind == "attribute" else f"[{self.key!r}]"

    def get(self, holder: Any) -> Any:  # noqa: ANN401 - engines hold whatever they like
        """What is there, or None."""
        try:
            if self.kind == "attribute":
                return getattr(holder, self.key)
            if self.kind == "item":
                return holder[self.key]
            return holder.__closure__[self.key].cell_contents
        except (AttributeError, LookupError, TypeError, ValueError):
            return None

    def put(self, holder: Any, value: torch.Tensor) -> None:  # noqa: ANN401
        """Raises TypeError or AttributeError where a holder cannot be changed."""
        if self.kind == "attribute":
            object.__setattr__(holder, self.key, value)  # Frozen dataclasses hold tensors, too.
        elif self.kind == "item":
            holder[self.key] = value
        else:
            holder.__closure__[self.key].cell_contents = value


_Path = tuple[_Step, ...]


class HeldTensors:
    """The tensors of a module, or of its quant method, that are no parameters or buffers of it.

    Args:
        module: The module as kernels and graphs use it now.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._held = dict(_tensors(module))
        self._attributes = [
            (holder, {n: v for n, v in vars(holder).items() if n not in _MODULE_OWN})
            for holder in (module, quant_method(module))
            if holder is not None
        ]

    def keep(self) -> None:
        """Copies tensors that were made anew into their old memory and puts the old ones back.

        Raises:
            EngineStateError: Naming a tensor that is gone, has another shape or dtype, or lies
                where nothing can be put back.
        """
        for path, old in self._held.items():
            holder = self._holder(path)
            new = path[-1].get(holder)
            name = type(self._module).__name__ + "".join(str(step) for step in path)
            if not isinstance(new, torch.Tensor):
                raise EngineStateError(
                    f"{name} is gone after the module was processed, but a kernel or graph may "
                    "hold it; reload the engine from disk"
                )
            if new.data_ptr() == old.data_ptr():
                continue
            if new.shape != old.shape or new.dtype != old.dtype:
                raise EngineStateError(
                    f"{name} changed from {old.dtype} {list(old.shape)} to "
                    f"{new.dtype} {list(new.shape)} while it was processed; reload from disk"
                )
            old.data.copy_(new.data)
            try:
                path[-1].put(holder, old)
            except (AttributeError, TypeError) as error:
                raise EngineStateError(
                    f"{name} was made anew and cannot be put back in a "
                    f"{type(holder).__name__}; reload the engine from disk"
                ) from error

    def restore(self) -> None:
        """Puts everything back as it was, after processing failed halfway.

        Otherwise the next refit would keep addresses that no graph knows.
        """
        for holder, attributes in self._attributes:
            own = vars(holder)
            for name in [n for n in own if n not in attributes and n not in _MODULE_OWN]:
                del own[name]
            own.update(attributes)
        for path, old in self._held.items():
            holder = self._holder(path)
            if path[-1].get(holder) is not old:
                with suppress(AttributeError, TypeError):
                    path[-1].put(holder, old)

    def _holder(self, path: _Path) -> Any:  # noqa: ANN401 - whatever object holds the tensor
        holder: Any = self._module
        for step in path[:-1]:
            holder = step.get(holder)
        return holder


def _tensors(module: torch.nn.Module) -> Iterator[tuple[_Path, torch.Tensor]]:
    """Breadth first, so that every object counts under its shortest path."""
    method = quant_method(module)
    seen: dict[int, object] = {id(module): module, id(method): method}
    level: list[tuple[_Path, object]] = [
        ((step,), child) for step, child in _children(module) if step.key not in _MODULE_OWN
    ]
    if method is not None:
        start = _Step("attribute", "quant_method")
        level += [((start, step), child) for step, child in _children(method)]
    for _ in range(_DEPTH):
        deeper: list[tuple[_Path, object]] = []
        for path, value in level:
            if isinstance(value, torch.Tensor):
                yield path, value
            elif id(value) not in seen and not _is_leaf(value):
                seen[id(value)] = value
                deeper += [((*path, step), child) for step, child in _children(value)]
        level = deeper


def _is_leaf(value: object) -> bool:
    if isinstance(value, torch.nn.Module) and any(p is not None for p in value.parameters(False)):
        return True  # A unit of its own, whose tensors may just be swapped for loading.
    return isinstance(value, _LEAVES) or type(value).__module__.startswith(_ELSEWHERE)


def _children(value: object) -> Iterator[tuple[_Step, object]]:
    if isinstance(value, dict):
        yield from ((_Step("item", key), child) for key, child in value.items())
    elif isinstance(value, list | tuple):
        yield from ((_Step("item", i), child) for i, child in enumerate(value))
    elif isinstance(value, types.FunctionType):
        for i in range(len(value.__closure__ or ())):
            step = _Step("variable", i)
            yield step, step.get(value)
    elif isinstance(value, types.MethodType):
        yield _Step("attribute", "__self__"), value.__self__
    elif isinstance(value, functools.partial):
        for name in ("func", "args", "keywords"):
            yield _Step("attribute", name), getattr(value, name)
    else:
        skip = _MODULE_OWN - set(_TENSORS) if isinstance(value, torch.nn.Module) else ()
        slots = (n for c in type(value).__mro__ for n in vars(c).get("__slots__", ()))
        for name in (*getattr(value, "__dict__", ()), *slots):
            step = _Step("attribute", name)
            if name not in skip:
                yield step, step.get(value)
