"""What the engine side must offer: Protocols that an engine's worker implements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class UnitView:
    """One module whose parameters are in loading layout.

    Attributes:
        name: Qualified module name.
        tensors: Attribute name -> loading-layout tensor, usually on the meta device.
        optional: Attributes that may stay unwritten (buffers, values the engine owns).
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    optional: frozenset[str]


class LoadingView(Protocol):
    """The model while its parameters are in loading layout."""

    @property
    def units(self) -> tuple[UnitView, ...]:
        """Modules in a fixed order."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Runs the engine's own loaders, unwrapped."""
        ...


@dataclass(frozen=True)
class Mode:
    """How a unit is installed, and why it is not direct."""

    name: str
    reason: str = ""


class UnitInstall(Protocol):
    """A processed or loader unit between its first byte and its commit."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Materialized loading-layout tensors to be filled."""
        ...

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Loader mode: runs the engine's loaders over whole tensors."""
        ...

    def finish(self) -> None:
        """Post-processes and copies the results into live storage; addresses stay."""
        ...

    def abort(self) -> None:
        """Puts the live tensors back; idempotent."""
        ...


class EngineModel(Protocol):
    """A model inside a running engine worker."""

    @property
    def device(self) -> torch.device:
        """Where live parameters are."""
        ...

    def loading_view(self) -> AbstractContextManager[LoadingView]:
        """Swaps to loading layout on meta; leaving puts live tensors back, also after errors."""
        ...

    def shared_with(self) -> dict[str, str]:
        """Units whose live tensors belong to an earlier unit (tied weights): name -> owner."""
        ...

    def probe(self, units: Iterable[str]) -> dict[str, Mode]:
        """Decides direct or processed per unit, by experiment."""
        ...

    def live(self, unit: str) -> Mapping[str, torch.Tensor]:
        """Live tensors of a unit: always the present ones, also when some are replaced later."""
        ...

    def begin(self, unit: str) -> UnitInstall:
        """Starts a processed or loader install of one unit."""
        ...

    def refresh_derived(self, units: Iterable[str]) -> None:
        """Recomputes what other modules derived from these units (tied heads, absorbed weights)."""
        ...
