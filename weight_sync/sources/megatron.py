"""Weights of a Megatron-style trainer, from an explicit description and without importing Megatron.

Megatron fuses and pads what checkpoints keep apart. Each entry says which views of one local tensor
are which regions of checkpoint tensors; nothing is copied or gathered to get there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from weight_sync.errors import LayoutError
from weight_sync.layout import Box
from weight_sync.manifest import Manifest, TensorSpec, build_manifest
from weight_sync.sources.casts import check_casts, wire_dtype
from weight_sync.sources.dtensor import local_tensor, region_of
from weight_sync.sources.megatron_grid import WHOLE, Axis, ParallelGrid


@dataclass(frozen=True)
class MegatronRegion:
    """A part of a local tensor that is a region of a checkpoint tensor.

    Attributes:
        name: Checkpoint name.
        shape: Global shape of the checkpoint tensor.
        box: Region of the checkpoint tensor.
        local: Region of the local tensor. Where one of the two has more dimensions, its first ones
            have size 1.
        transposed: The last two dimensions of the checkpoint tensor are swapped locally.
        alias_of: Checkpoint name this one is tied to, or empty.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    local: Box
    transposed: bool = False
    alias_of: str = ""

    def viewed_size(self) -> tuple[int, ...]:
        """The shape that :meth:`view` gives."""
        size = self.local.size
        if self.transposed:
            size = (*size[:-2], size[-1], size[-2])
        extra = len(size) - len(self.box.size)
        if any(n != 1 for n in size[: max(extra, 0)]):
            return size
        return (1,) * -extra + size[max(extra, 0) :]

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The region's elements in the local tensor, shaped like ``box``."""
        for dim, (start, length) in enumerate(zip(self.local.offset, self.local.size, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        if self.transposed:
            tensor = tensor.transpose(-1, -2)
        while tensor.ndim > len(self.box.size):
            tensor = tensor.squeeze(0)
        while tensor.ndim < len(self.box.size):
            tensor = tensor.unsqueeze(0)
        return tensor


@dataclass(frozen=True, eq=False)
class MegatronEntry:
    """One local tensor of this rank.

    Attributes:
        name: Name in the Megatron model, for errors.
        tensor: The parameter itself (not a view of it), plain or DTensor.
        shape: Megatron's own global shape: fused, padded, before any parallel axis cut it.
        dim: Dimension that ``axis`` cuts, or None if every rank holds all of it.
        axis: Parallel axis that cuts the tensor.
        regions: What of it belongs to which checkpoint tensor; the rest (padding) is never sent.
    """

    name: str
    tensor: torch.Tensor
    shape: tuple[int, ...]
    dim: int | None
    axis: Axis
    regions: tuple[MegatronRegion, ...]

    def local_box(self) -> Box:
        """The region of ``shape`` that this rank must hold.

        Raises:
            LayoutError: If the axis does not divide the dimension.
        """
        offset, size = [0] * len(self.shape), list(self.shape)
        if self.dim is not None:
            if size[self.dim] % self.axis.size:
                raise LayoutError(
                    f"{self.name}: dimension {self.dim} of global shape {self.shape} does not "
                    f"divide over {self.axis.size} ranks; check its padding and its parallel axis"
                )
            size[self.dim] //= self.axis.size
            offset[self.dim] = self.axis.rank * size[self.dim]
        return Box(tuple(offset), tuple(size))

    def check(self, where: str) -> None:
        """Compares the description with the tensor.

        Raises:
            LayoutError: Naming the tensor, its local shape and the expected shapes.
        """
        expected = self.local_box()
        have = tuple(local_tensor(self.name, self.tensor).shape)
        declared = region_of(self.name, self.tensor) if isinstance(self.tensor, DTensor) else None
        if have != expected.size or (declared is not None and declared != expected):
            cut = f"cut along dimension {self.dim} over {self.axis.size} ranks"
            raise LayoutError(
                f"{self.name} has local shape {have} on {where}, expected {expected.size}: global "
                f"shape {self.shape}, {'not cut' if self.dim is None else cut}. Check the tensor's "
                "tp/etp flag and the shape in its description"
            )
        for region in self.regions:
            end = [o + n for o, n in zip(region.local.offset, region.local.size, strict=True)]
            if (
                region.viewed_size() != region.box.size
                or len(end) != len(have)
                or any(e > n for e, n in zip(end, have, strict=True))
            ):
                raise LayoutError(
                    f"{self.name} of local shape {have} gives {region.local} where {region.name} "
                    f"of global shape {region.shape} expects {region.box}; check its description"
                )


@dataclass(frozen=True, eq=False)
class _Held:
    """One offered region, and what its local tensor was when it was described."""

    entry: MegatronEntry
    region: MegatronRegion
    shape: tuple[int, ...]
    dtype: torch.dtype


class MegatronSource:
    """The weights of one trainer rank of a TP/PP/VPP/EP/ETP grid, as a ``WeightSource``.

    Several entries may hold the same region of a checkpoint tensor, as the embedding copy of a
    multi-token prediction layer does: on one rank the first is offered, on several ranks they are
    replicas. Tensors may be offered in part by one rank and in part by others.

    Args:
        grid: This rank's place.
        entries: Every local tensor that is trained, of all model chunks.
        cast: Checkpoint name or ``prefix*`` -> dtype name on the wire.

    Raises:
        LayoutError: If an entry contradicts its tensor or the grid.
        ConfigError: If a cast has no float target.
    """

    def __init__(
        self,
        grid: ParallelGrid,
        entries: Sequence[MegatronEntry],
        *,
        cast: Mapping[str, str] | None = None,
    ) -> None:
        self._casts = check_casts(cast or {})
        self._entries = tuple(entries)
        self._stage = grid.pp.rank
        self._addresses: tuple[int, ...] | None = None
        self._generation = 0
        for entry in self._entries:
            if entry.axis not in (WHOLE, grid.tp, grid.etp):
                raise LayoutError(
                    f"{entry.name} is cut along an axis {entry.axis} that is neither tp nor etp of "
                    f"this rank ({grid.describe()})"
                )
            entry.check(grid.describe())
        self._specs, self._owned = self._collect()
        self._regions = [held for owned in self._owned.values() for held in owned]

    def prepare(self) -> None:
        """Nothing to do: Megatron keeps this rank's parameters where the optimizer updates them."""

    def manifest(self, rank: int, host: str, device: str) -> Manifest:
        """Names, dtypes, global shapes and owned regions; no data is touched."""
        addresses = self.fingerprint()
        if self._addresses not in (None, addresses):
            self._generation += 1
        self._addresses = addresses
        tensors = [
            (spec, [held.region.box for held in self._owned[name]])
            for name, spec in self._specs.items()
        ]
        return build_manifest(rank, host, device, tensors, self._generation, self._stage)

    def region(self, number: int) -> torch.Tensor:
        """The local tensor of one region of the manifest: a view, never a copy.

        Raises:
            LayoutError: If the parameter changed its shape or dtype since it was described.
        """
        held = self._regions[number]
        local = local_tensor(held.entry.name, held.entry.tensor)
        if (tuple(local.shape), local.dtype) != (held.shape, held.dtype):
            raise LayoutError(
                f"{held.entry.name} is {local.dtype} {tuple(local.shape)} now, but was described "
                f"as {held.dtype} {held.shape}; make a new source after changing the model"
            )
        return held.region.view(local)

    def fingerprint(self) -> tuple[int, ...]:
        """Addresses of all regions; changes when a tensor was replaced, moved or offloaded."""
        return tuple(self.region(i).data_ptr() for i in range(len(self._regions)))

    def _collect(self) -> tuple[dict[str, TensorSpec], dict[str, list[_Held]]]:
        specs: dict[str, TensorSpec] = {}
        owned: dict[str, list[_Held]] = {}
        seen: set[tuple[str, Box]] = set()
        for entry in self._entries:
            dtype = str(entry.tensor.dtype).removeprefix("torch.")
            shape = entry.local_box().size
            for region in entry.regions:
                wire = wire_dtype(region.name, dtype, self._casts)
                spec = TensorSpec(region.name, wire, region.shape, region.alias_of)
                if specs.setdefault(region.name, spec) != spec:
                    raise LayoutError(
                        f"{entry.name} describes {region.name} as {wire} {region.shape}, another "
                        f"entry of this rank as {specs[region.name].dtype} "
                        f"{specs[region.name].shape}; both must agree"
                    )
                held = owned.setdefault(region.name, [])
                if region.box.elements and (region.name, region.box) not in seen:
                    seen.add((region.name, region.box))
                    held.append(_Held(entry, region, shape, entry.tensor.dtype))
        return specs, owned
