"""Regions of a global tensor, and the rules that tell which region a rank owns.

A region is a box: an offset and a size per dimension. Placements follow torch: ``Shard`` cuts as
``torch.chunk`` does (all chunks of ``ceil(n / parts)`` but the last ones, which may be short or
empty), ``StridedShard`` is what FSDP2 makes of a dimension that tensor parallelism had cut before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from weight_sync.errors import LayoutError


@dataclass(frozen=True)
class Box:
    """A region of a global tensor.

    Attributes:
        offset: First index per dimension.
        size: Number of indices per dimension; may be 0.
    """

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None where there is none."""
        offset = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        end = tuple(
            min(a + n, b + m)
            for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        size = tuple(e - o for o, e in zip(offset, end, strict=True))
        return Box(offset, size) if all(n > 0 for n in size) else None

    def subtract(self, other: Box) -> list[Box]:
        """What is left of this region without ``other``, as disjoint boxes."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.elements else []
        left: list[Box] = []
        offset, size = list(self.offset), list(self.size)
        for d in range(len(offset)):
            before = common.offset[d] - offset[d]
            after = offset[d] + size[d] - (common.offset[d] + common.size[d])
            if before:
                left.append(Box(tuple(offset), (*size[:d], before, *size[d + 1 :])))
            if after:
                start = (*offset[:d], common.offset[d] + common.size[d], *offset[d + 1 :])
                left.append(Box(start, (*size[:d], after, *size[d + 1 :])))
            offset[d], size[d] = common.offset[d], common.size[d]
        return left


@dataclass(frozen=True)
class Replicate:
    """Every rank along this mesh dimension holds the same region."""


@dataclass(frozen=True)
class Shard:
    """Ranks along this mesh dimension hold consecutive chunks of ``dim``."""

    dim: int


@dataclass(frozen=True)
class StridedShard:
    """A chunk of what the mesh dimensions to the right already cut (torch's ``_StridedShard``)."""

    dim: int
    split_factor: int


Placement = Replicate | Shard | StridedShard


def full_box(shape: Sequence[int]) -> Box:
    """The whole tensor as one region."""
    return Box((0,) * len(shape), tuple(shape))


def chunk_range(length: int, parts: int, index: int) -> tuple[int, int]:
    """Offset and size of chunk ``index`` when ``torch.chunk`` cuts ``length`` into ``parts``."""
    if parts < 1 or not 0 <= index < parts:
        raise LayoutError(f"chunk {index} of {parts} does not exist; check the mesh coordinates")
    step = -(-length // parts)
    start = min(index * step, length)
    return start, min(step, length - start)


def shard_box(
    shape: Sequence[int],
    mesh: Sequence[int],
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> Box:
    """The region that the rank at ``coordinate`` of a device mesh holds.

    Args:
        shape: Global shape of the tensor.
        mesh: Size of each mesh dimension.
        placements: One placement per mesh dimension.
        coordinate: The rank's position per mesh dimension.

    Returns:
        One box; strided shards are nested chunks, so they are one box too.

    Raises:
        LayoutError: If the arguments do not belong together.
    """
    if not len(mesh) == len(placements) == len(coordinate):
        raise LayoutError(
            f"mesh {tuple(mesh)}, placements {tuple(placements)} and coordinate "
            f"{tuple(coordinate)} must have one entry per mesh dimension"
        )
    # torch cuts plain shards from the outer mesh dimension inwards; a strided shard was added
    # later (FSDP2 after TP), so it cuts what all plain shards have left.
    plain = [i for i, p in enumerate(placements) if isinstance(p, Shard)]
    strided = [i for i, p in enumerate(placements) if isinstance(p, StridedShard)]
    offset, size = [0] * len(shape), list(shape)
    for i in [*plain, *reversed(strided)]:
        placement = placements[i]
        assert isinstance(placement, Shard | StridedShard)
        dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
        if not 0 <= dim < len(shape):
            raise LayoutError(f"{placement} does not fit a tensor of shape {tuple(shape)}")
        if isinstance(placement, StridedShard):
            _check_split_factor(shape, mesh, placements, i)
        start, count = chunk_range(size[dim], mesh[i], coordinate[i])
        offset[dim] += start
        size[dim] = count
    return Box(tuple(offset), tuple(size))


def _check_split_factor(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement], at: int
) -> None:
    """Refuses strided shards that interleave, which no single box describes."""
    strided = placements[at]
    assert isinstance(strided, StridedShard)
    cuts = prod(
        mesh[j]
        for j in range(at + 1, len(mesh))
        if not isinstance(p := placements[j], Replicate)
        and p.dim % len(shape) == strided.dim % len(shape)
    )
    if strided.split_factor != cuts:
        raise LayoutError(
            f"{strided} on mesh dimension {at} of {tuple(mesh)} interleaves a tensor of shape "
            f"{tuple(shape)}: mesh dimensions to its right cut it {cuts} times; redistribute it to "
            "plain shards before the refit"
        )


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)
