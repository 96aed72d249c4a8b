"""Builds manifests and recordings by hand, and carries plans out on NumPy arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weight_sync.arrays import pack
from weight_sync.layout import Box, contiguous_strides, full_box
from weight_sync.manifest import Manifest, TensorSpec, build_manifest, pad_boxes
from weight_sync.membership import Membership
from weight_sync.plan import Plan
from weight_sync.recording import ParameterSpec, Recording, SourceSpec, UnitSpec


@dataclass(frozen=True)
class Slice:
    """A region of a tensor that a worker wants, stored row-major in a parameter of its own."""

    spec: TensorSpec
    box: Box
    parameter_dtype: str = ""


def manifest(rank: int, held: Iterable[tuple[TensorSpec, Sequence[Box]]]) -> Manifest:
    return build_manifest(rank, f"host{rank // 2}", "cpu", held)


def whole(*specs: TensorSpec) -> list[tuple[TensorSpec, list[Box]]]:
    return [(spec, [full_box(spec.shape)]) for spec in specs]


def recording(slices: Sequence[Slice]) -> Recording:
    """One parameter, unit and digest slot per slice."""
    names = list(dict.fromkeys(s.spec.name for s in slices))
    specs = {s.spec.name: s.spec for s in slices}
    width = max((len(s.spec.shape) for s in slices), default=1) or 1
    offset, size = pad_boxes([s.box for s in slices], width)
    strides = np.zeros((len(slices), width), np.int64)
    for i, s in enumerate(slices):
        if s.box.size:
            strides[i, width - len(s.box.size) :] = contiguous_strides(s.box.size)
    source = np.array([names.index(s.spec.name) for s in slices], np.int32)
    numbers = np.arange(len(slices), dtype=np.int32)
    return Recording(
        sources=tuple(SourceSpec(n, specs[n].dtype, specs[n].shape) for n in names),
        parameters=tuple(
            ParameterSpec(f"p{i}", s.parameter_dtype or s.spec.dtype, s.box.size, i)
            for i, s in enumerate(slices)
        ),
        units=tuple(UnitSpec(f"u{i}", "direct") for i in range(len(slices))),
        source=pack(source),
        parameter=pack(numbers),
        offset=pack(offset),
        size=pack(size),
        dst_offset=pack(np.zeros(len(slices), np.int64)),
        dst_stride=pack(strides),
        slot=pack(numbers),
        slot_source=pack(source),
    )


def members(trainers: int, workers: int, epoch: int = 1) -> Membership:
    return Membership(epoch, trainers, tuple(range(workers)), 1)


def values(specs: Iterable[TensorSpec]) -> dict[str, NDArray[np.int64]]:
    """A different number in every element of every tensor."""
    out, base = {}, 0
    for spec in specs:
        count = math.prod(spec.shape)
        out[spec.name] = np.arange(base, base + count, dtype=np.int64).reshape(spec.shape)
        base += count
    return out


def cut(array: NDArray[Any], box: Box) -> NDArray[Any]:
    """The region as a view, also of a 0-dim array."""
    return array[(*(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True)), ...)]


def delivered(
    plan: Plan, worker: int, manifests: Sequence[Manifest], data: Mapping[str, NDArray[np.int64]]
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Runs one worker's program: the parameters it ends with, and how often each element came.

    Every piece is read from the region of the sender's own manifest that the program names.
    """
    program = plan.receiver_program(worker)
    slices, senders, regions = (a.unpack() for a in (program.slice, program.sender, program.region))
    offset, size = program.offset.unpack(), program.size.unpack()
    target = plan.recordings[program.class_id]
    source = target.source.unpack()
    start = target.offset.unpack()
    out = [np.full(p.shape, -1, np.int64) for p in target.parameters]
    times = [np.zeros(p.shape, np.int64) for p in target.parameters]
    owned_by = [m.regions() for m in manifests]
    for row in range(len(slices)):
        number = int(slices[row])
        spec, owned = owned_by[int(senders[row])][int(regions[row])]
        assert spec.name == target.sources[int(source[number])].name
        rank = len(spec.shape)
        piece = Box(
            tuple(offset[row, offset.shape[1] - rank :].tolist()),
            tuple(size[row, size.shape[1] - rank :].tolist()),
        )
        assert owned.intersect(piece) == piece, "the sender does not own the piece"
        first = start[number, start.shape[1] - rank :].tolist()
        place = Box(tuple(o - f for o, f in zip(piece.offset, first, strict=True)), piece.size)
        cut(out[number], place)[...] = cut(data[spec.name], piece)
        cut(times[number], place)[...] += 1
    return out, times
