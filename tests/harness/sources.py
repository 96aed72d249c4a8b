"""A weight source made of any tensors and any regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weight_sync.layout import Box, full_box
from weight_sync.manifest import Manifest, TensorSpec, build_manifest


@dataclass(frozen=True)
class Held:
    """What one rank holds of one tensor.

    Attributes:
        shape: Global shape.
        dtype: dtype name on the wire.
        parts: Regions with the local tensors behind them.
        unit: Tensors with the same unit travel in one bucket.
    """

    shape: tuple[int, ...]
    dtype: str
    parts: Sequence[tuple[Box, torch.Tensor]]
    unit: str = ""


def whole(tensor: torch.Tensor, dtype: str = "") -> Held:
    """A tensor this rank holds completely, in whatever layout it lies."""
    name = dtype or str(tensor.dtype).removeprefix("torch.")
    return Held(tuple(tensor.shape), name, [(full_box(tensor.shape), tensor)])


def rows(full: torch.Tensor, first: int, last: int) -> Held:
    """Rows ``first`` to ``last`` of a tensor, in memory of their own; no part if there are none."""
    name = str(full.dtype).removeprefix("torch.")
    if first == last:
        return Held(tuple(full.shape), name, [])
    offset = (first, *[0] * (full.dim() - 1))
    box = Box(offset, (last - first, *full.shape[1:]))
    return Held(tuple(full.shape), name, [(box, full[first:last].clone())])


class BoxSource:
    """Implements ``WeightSource`` for tensors of a test."""

    def __init__(self, tensors: Mapping[str, Held]) -> None:
        self._tensors = dict(tensors)
        self.regions = [t for held in tensors.values() for _, t in held.parts]

    def manifest(self, rank: int, host: str, device: str) -> Manifest:
        entries = [
            (TensorSpec(name, h.dtype, h.shape, unit=h.unit), [box for box, _ in h.parts])
            for name, h in self._tensors.items()
        ]
        return build_manifest(rank, host, device, entries)

    def region(self, number: int) -> torch.Tensor:
        return self.regions[number]

    def prepare(self) -> None:
        """Nothing is sharded away."""

    def fingerprint(self) -> tuple[int, ...]:
        return tuple(t.data_ptr() for t in self.regions)
