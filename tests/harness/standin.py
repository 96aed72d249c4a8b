"""A stand-in engine: real tensors in fused layout with real loaders, driven by the real agent.

It implements ``EngineModel`` for models that a test builds from units, so that layouts,
post-processing and faults can be chosen freely. A fresh stand-in that loaded a checkpoint is the
oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from weight_sync.worker.model import Mode, UnitView

Tensors = dict[str, torch.Tensor]
PostLoad = Callable[[Tensors], Tensors]
Loader = Callable[[Tensors, torch.Tensor], None]


@dataclass(frozen=True)
class Unit:
    """One module.

    Attributes:
        name: Qualified name.
        shapes: Attribute -> shape and dtype in loading layout.
        post_load: Makes the live tensors of the loaded ones; None if they are the same.
        buffers: Live tensors no loader writes, with their start values.
        tied_to: Unit whose live tensors these are.
    """

    name: str
    shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    post_load: PostLoad | None = None
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tied_to: str = ""


class StandinModel:
    """Implements ``EngineModel``.

    Args:
        units: Modules.
        loaders: Checkpoint name -> unit name and what its loader does; several may read one name.
        rename: Turns checkpoint names into the names of ``loaders``.
        derive: Recomputes tensors that other units derive, after units changed.
    """

    def __init__(
        self,
        units: Iterable[Unit],
        loaders: Mapping[str, list[tuple[str, Loader]]],
        rename: Callable[[str], str] = str,
        derive: Callable[[StandinModel, set[str]], None] | None = None,
    ) -> None:
        self.units = {unit.name: unit for unit in units}
        self._loaders = loaders
        self._rename = rename
        self._derive = derive
        self.device = torch.device("cpu")
        self.events: list[tuple[str, str]] = []
        self._live: dict[str, Tensors] = {}
        self._loading: dict[str, Tensors] = {}

    # --- a fresh engine -------------------------------------------------------------------------

    def load(self, checkpoint: Mapping[str, torch.Tensor]) -> StandinModel:
        """Loads from a checkpoint, as an engine that starts."""
        self._loading = {n: empty(u, "cpu") for n, u in self.units.items()}
        self.load_weights(checkpoint.items())
        for name, unit in self.units.items():
            loaded = self._loading[unit.tied_to or name]
            made = unit.post_load(loaded) if unit.post_load else dict(loaded)
            self._live[name] = made | {n: b.clone() for n, b in unit.buffers.items()}
        for name, unit in self.units.items():
            if unit.tied_to:
                self._live[name] = self._live[unit.tied_to]
        self._loading = {}
        if self._derive:
            self._derive(self, set(self.units))
        return self

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            for unit, loader in self._loaders.get(self._rename(name), ()):
                loader(self._loading[unit], tensor)

    def tensors(self) -> Tensors:
        """All live tensors by qualified name."""
        return {
            f"{unit}.{name}": tensor
            for unit, tensors in self._live.items()
            for name, tensor in tensors.items()
        }

    def poison(self) -> None:
        """Fills every live tensor that a refit must write with values that show."""
        for name, tensors in self._live.items():
            for attribute, tensor in tensors.items():
                if attribute not in self.units[name].buffers:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 0x7F)

    # --- EngineModel ----------------------------------------------------------------------------

    @contextmanager
    def loading_view(self) -> Iterator[_View]:
        self._loading = {n: empty(u, "meta") for n, u in self.units.items()}
        try:
            yield _View(self, self._loading)
        finally:
            self._loading = {}

    def shared_with(self) -> dict[str, str]:
        return {n: u.tied_to for n, u in self.units.items() if u.tied_to}

    def probe(self, units: Iterable[str]) -> dict[str, Mode]:
        """Runs each unit's post-processing on a pattern."""
        return {name: self._mode(self.units[name]) for name in units}

    def _mode(self, unit: Unit) -> Mode:
        if unit.post_load is None:
            return Mode("direct")
        pattern = empty(unit, "cpu")
        for tensor in pattern.values():
            count = torch.arange(tensor.numel()) % 251
            tensor.copy_(count.reshape(tensor.shape).to(tensor.dtype))
        wanted = {name: tensor.clone() for name, tensor in pattern.items()}
        made = unit.post_load(pattern)
        if made.keys() == wanted.keys() and all(torch.equal(made[n], wanted[n]) for n in made):
            return Mode("direct")
        return Mode("processed", "post-processing changes it")

    def live(self, unit: str) -> Tensors:
        return self._live[unit]

    def begin(self, unit: str) -> _Install:
        self.events.append(("begin", unit))
        return _Install(self, self.units[unit])

    def refresh_derived(self, units: Iterable[str]) -> None:
        self.events.append(("refresh", ""))
        if self._derive:
            self._derive(self, set(units))


def empty(unit: Unit, device: str) -> Tensors:
    """Loading-layout tensors that hold NaN (or 0x7F) everywhere."""
    made = {}
    for name, (shape, dtype) in unit.shapes.items():
        tensor = torch.empty(shape, dtype=dtype, device=device)
        made[name] = tensor.fill_(float("nan") if dtype.is_floating_point else 0x7F)
    return made


class _View:
    """Implements ``LoadingView``."""

    def __init__(self, model: StandinModel, loading: Mapping[str, Tensors]) -> None:
        self._model = model
        self.units = tuple(
            UnitView(
                name,
                loading[name] | {b: t.to("meta") for b, t in unit.buffers.items()},
                frozenset(unit.buffers),
            )
            for name, unit in model.units.items()
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model.load_weights(weights)


class _Install:
    """Implements ``UnitInstall``."""

    def __init__(self, model: StandinModel, unit: Unit) -> None:
        self._model = model
        self._unit = unit
        self.tensors = empty(unit, "cpu")
        model._loading[unit.name] = self.tensors

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._model.load_weights(weights)

    def finish(self) -> None:
        self._model.events.append(("finish", self._unit.name))
        made = self._unit.post_load(self.tensors) if self._unit.post_load else self.tensors
        for name, tensor in made.items():
            self._model._live[self._unit.name][name].copy_(tensor)
        self._model._loading.pop(self._unit.name, None)

    def abort(self) -> None:
        self._model.events.append(("abort", self._unit.name))
        self._model._loading.pop(self._unit.name, None)


# --- loaders ------------------------------------------------------------------------------------


def copies(attribute: str) -> Loader:
    """Copies the checkpoint tensor as it is."""

    def load(tensors: Tensors, loaded: torch.Tensor) -> None:
        tensors[attribute].copy_(loaded)

    return load


def takes(attribute: str, dim: int, rank: int, tp: int, at: int = 0, of: int = 0) -> Loader:
    """Copies this worker's share along ``dim`` into ``of`` elements that start at ``at``.

    Args:
        attribute: Destination.
        dim: Dimension that tensor parallelism cuts.
        rank: Worker.
        tp: Number of workers.
        at: First element of the destination along ``dim``.
        of: Elements of the destination along ``dim``; 0 for all of it.
    """

    def load(tensors: Tensors, loaded: torch.Tensor) -> None:
        share = loaded.shape[dim] // tp
        target = tensors[attribute]
        target.narrow(dim, at, of or target.shape[dim]).copy_(
            loaded.narrow(dim, rank * share, share)
        )

    return load
