"""What one trainer rank holds: names, dtypes, global shapes and the regions it owns.

A manifest is made without touching tensor data. It travels once per epoch to whoever plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from weight_sync.arrays import PackedArray, pack
from weight_sync.dtypes import itemsize
from weight_sync.errors import LayoutError, shorten
from weight_sync.layout import Box


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor as the trainer offers it.

    Attributes:
        name: Checkpoint (Hugging Face) name.
        dtype: torch dtype name of the values on the wire, after declared transforms.
        shape: Global shape.
        alias_of: Name of the tensor this one shares memory with (tied weights), or empty.
        unit: Tensors with the same non-empty unit travel in one bucket (value and its scale).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias_of: str = ""
    unit: str = ""

    def __post_init__(self) -> None:
        itemsize(self.dtype)
        if any(n < 0 for n in self.shape):
            raise LayoutError(f"{self.name} has a negative size in its shape {self.shape}")


class Manifest(msgspec.Struct, frozen=True):
    """What one trainer rank holds.

    Attributes:
        rank: Trainer rank.
        host: Identity of the machine, for transports that stay on it.
        device: Identity of the accelerator (UUID), or ``"cpu"``.
        tensors: Every tensor this rank knows of, also those it owns no region of.
        owner: int32 ``[n]``, index into ``tensors`` of each owned region.
        offset: int64 ``[n, R]`` region offsets, padded on the left with 0.
        size: int64 ``[n, R]`` region sizes, padded on the left with 1.
        generation: Grows when storages moved and handles must be exported again.
        stage: Pipeline stage of the rank.
    """

    rank: int
    host: str
    device: str
    tensors: tuple[TensorSpec, ...]
    owner: PackedArray
    offset: PackedArray
    size: PackedArray
    generation: int = 0
    stage: int = 0

    def regions(self) -> list[tuple[TensorSpec, Box]]:
        """The owned regions, in the order that region numbers refer to."""
        owner, offset, size = (a.unpack() for a in (self.owner, self.offset, self.size))
        out = []
        for i in range(len(owner)):
            spec = self.tensors[int(owner[i])]
            pad = offset.shape[1] - len(spec.shape)
            out.append(
                (spec, Box(tuple(map(int, offset[i, pad:])), tuple(map(int, size[i, pad:]))))
            )
        return out


def build_manifest(
    rank: int,
    host: str,
    device: str,
    tensors: Iterable[tuple[TensorSpec, Iterable[Box]]],
    generation: int = 0,
    stage: int = 0,
) -> Manifest:
    """Builds a manifest from tensors and the boxes this rank owns of each.

    Raises:
        LayoutError: If a box leaves its tensor or a name comes twice.
    """
    specs: list[TensorSpec] = []
    owners: list[int] = []
    boxes: list[Box] = []
    seen: set[str] = set()
    for spec, owned in tensors:
        if spec.name in seen:
            raise LayoutError(f"trainer rank {rank} names {spec.name} twice; names must be unique")
        seen.add(spec.name)
        for box in owned:
            if len(box.size) != len(spec.shape) or any(
                o < 0 or n < 0 or o + n > full
                for o, n, full in zip(box.offset, box.size, spec.shape, strict=True)
            ):
                raise LayoutError(
                    f"trainer rank {rank}: region offset={box.offset} size={box.size} does not lie "
                    f"in {spec.name} of global shape {spec.shape}; check tp/ep metadata of this "
                    "tensor"
                )
            if box.elements or 0 in spec.shape:
                owners.append(len(specs))
                boxes.append(box)
        specs.append(spec)
    width = max((len(s.shape) for s in specs), default=1) or 1
    offset, size = pad_boxes(boxes, width)
    return Manifest(
        rank,
        host,
        device,
        tuple(specs),
        pack(np.asarray(owners, np.int32)),
        pack(offset),
        pack(size),
        generation,
        stage,
    )


def pad_boxes(boxes: list[Box], width: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Boxes as int64 ``[n, width]`` offsets (left-padded with 0) and sizes (with 1)."""
    offset = np.zeros((len(boxes), width), np.int64)
    size = np.ones((len(boxes), width), np.int64)
    for i, box in enumerate(boxes):
        if box.size:
            offset[i, width - len(box.size) :] = box.offset
            size[i, width - len(box.size) :] = box.size
    return offset, size


def widen(array: NDArray[np.int64], width: int, fill: int) -> NDArray[np.int64]:
    """Pads ``[n, r]`` on the left to ``[n, width]``."""
    if array.shape[1] == width:
        return array
    out = np.full((len(array), width), fill, np.int64)
    out[:, width - array.shape[1] :] = array
    return out


@dataclass(frozen=True)
class Catalogue:
    """All tensors of all trainer ranks, in one agreed order (sorted by name).

    Attributes:
        tensors: Specs sorted by name.
        index: Name -> position.
    """

    tensors: tuple[TensorSpec, ...]
    index: Mapping[str, int] = field(compare=False)

    @cached_property
    def width(self) -> int:
        """Largest rank of any tensor, at least 1."""
        return max((len(t.shape) for t in self.tensors), default=1) or 1

    def shapes(self) -> NDArray[np.int64]:
        """int64 ``[tensors, width]``, left-padded with 1."""
        width = self.width
        rows = [(1,) * (width - len(t.shape)) + t.shape for t in self.tensors]
        return np.array(rows, np.int64).reshape(len(rows), width)

    def itemsizes(self) -> NDArray[np.int64]:
        """int64 ``[tensors]`` bytes per element."""
        return np.array([itemsize(t.dtype) for t in self.tensors], np.int64)


def build_catalogue(manifests: Iterable[Manifest]) -> Catalogue:
    """Unites manifests; ranks that describe the same name differently are an error.

    Raises:
        LayoutError: Naming the tensors and both ranks.
    """
    known: dict[str, tuple[TensorSpec, int]] = {}
    conflicts: list[str] = []
    for manifest in manifests:
        for spec in manifest.tensors:
            other, rank = known.setdefault(spec.name, (spec, manifest.rank))
            if other != spec:
                conflicts.append(
                    f"{spec.name} (rank {rank}: {other.dtype} {list(other.shape)}, "
                    f"rank {manifest.rank}: {spec.dtype} {list(spec.shape)})"
                )
    if conflicts:
        raise LayoutError(
            f"trainer ranks disagree about {len(conflicts)} tensors: {shorten(conflicts)}. "
            "Every rank must declare the same global shape, dtype and aliases."
        )
    tensors = tuple(spec for _, (spec, _) in sorted(known.items()))
    return Catalogue(tensors, {t.name: i for i, t in enumerate(tensors)})
