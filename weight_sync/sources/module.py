"""Weights of a torch module: plain, FSDP2, tensor parallel, HSDP, and FSDP2 over tensor parallel.

The regions come from each DTensor's own mesh and placements. The trainer never gathers: what a rank
offers is its local shard, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.fsdp import FSDPModule

from weight_sync.errors import LayoutError
from weight_sync.layout import Box
from weight_sync.manifest import Manifest, TensorSpec, build_manifest
from weight_sync.sources.casts import check_casts, wire_dtype
from weight_sync.sources.dtensor import local_tensor, region_of

# Wrappers add these to names; checkpoints never contain them.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class _Slot:
    """Where a parameter lives; FSDP2 replaces the object in it, so it is looked up every time."""

    name: str
    module: torch.nn.Module
    attribute: str

    def tensor(self) -> torch.Tensor:
        parameter = self.module._parameters.get(self.attribute)
        found = self.module._buffers.get(self.attribute) if parameter is None else parameter
        if found is None:
            raise LayoutError(f"{self.name} is no longer in the module; make a new manifest")
        return found


@dataclass(frozen=True)
class _Region:
    slot: _Slot
    size: tuple[int, ...]
    dtype: torch.dtype


class ModuleSource:
    """The weights of one trainer rank's module, as a ``WeightSource``.

    Parameters and persistent buffers are offered. A parameter that is no DTensor counts as a full
    replica on every rank. One parameter under several names (tied weights) is offered under each of
    them, as an alias of the first.

    Args:
        module: The trainer's module.
        cast: Checkpoint name or ``prefix*`` -> dtype name on the wire, e.g. ``{"*": "bfloat16"}``.
        rename: Turns a name of the module into its checkpoint name.

    Raises:
        ConfigError: If a cast has no float target.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        cast: Mapping[str, str] | None = None,
        rename: Callable[[str], str] | None = None,
    ) -> None:
        self._module = module
        self._casts = check_casts(cast or {})
        self._rename = rename
        self._regions: list[_Region] = []
        self._addresses: tuple[int, ...] | None = None
        self._generation = 0

    def prepare(self) -> None:
        """Puts every FSDP2 module back to its shards, so that regions are the optimizer's tensors.

        Frees gathered parameters; communicates nothing.
        """
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def manifest(self, rank: int, host: str, device: str) -> Manifest:
        """Names, dtypes, global shapes and owned regions; no data is touched.

        Raises:
            LayoutError: If placements are partial, or contradict local shapes, naming the tensor.
            ConfigError: If a cast names a tensor that cannot be cast.
        """
        self.prepare()
        regions: list[_Region] = []
        tensors: list[tuple[TensorSpec, list[Box]]] = []
        first_name: dict[int, str] = {}
        for slot in self._slots():
            tensor = slot.tensor()
            dtype = str(tensor.dtype).removeprefix("torch.")
            spec = TensorSpec(
                slot.name,
                wire_dtype(slot.name, dtype, self._casts),
                tuple(tensor.shape),
                alias_of=first_name.get(id(tensor), ""),
            )
            first_name.setdefault(id(tensor), slot.name)
            box = region_of(slot.name, tensor)
            owned = [box] if box is not None and (box.elements or 0 in spec.shape) else []
            regions += [_Region(slot, b.size, tensor.dtype) for b in owned]
            tensors.append((spec, owned))
        addresses = tuple(_local(r.slot).data_ptr() for r in regions)
        if self._addresses not in (None, addresses):
            self._generation += 1
        self._regions, self._addresses = regions, addresses
        return build_manifest(rank, host, device, tensors, self._generation)

    def region(self, number: int) -> torch.Tensor:
        """The local tensor of one region of the last manifest: a view, never a copy.

        Raises:
            LayoutError: If the parameter is not what the manifest said.
        """
        region = self._regions[number]
        local = _local(region.slot)
        if tuple(local.shape) != region.size or local.dtype != region.dtype:
            raise LayoutError(
                f"{region.slot.name} is {local.dtype} {tuple(local.shape)} now, but the manifest "
                f"said {region.dtype} {region.size}; call prepare() on the trainer's thread first, "
                "and make a new manifest after changing the module"
            )
        return local

    def fingerprint(self) -> tuple[int, ...]:
        """Addresses of all regions; changes when a tensor was replaced, moved or offloaded."""
        return tuple(_local(r.slot).data_ptr() for r in self._regions)

    def _slots(self) -> Iterator[_Slot]:
        for prefix, module in self._module.named_modules(remove_duplicate=False):
            persistent = (
                key for key in module._buffers if key not in module._non_persistent_buffers_set
            )
            for key in (*module._parameters, *persistent):
                if module._parameters.get(key) is None and module._buffers.get(key) is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                for wrapper in _WRAPPERS:
                    name = name.replace(wrapper, "")
                yield _Slot(self._rename(name) if self._rename else name, module, key)


def _local(slot: _Slot) -> torch.Tensor:
    return local_tensor(slot.name, slot.tensor())
