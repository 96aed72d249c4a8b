"""Hashes what a trainer rank contributes, with the values as they go on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from weight_sync.kernels.base import CompiledDigest
from weight_sync.kernels.compiler import compile_digest
from weight_sync.kernels.pieces import PieceTable
from weight_sync.layout import contiguous_strides
from weight_sync.manifest import Manifest, widen
from weight_sync.program import HashTask
from weight_sync.trainer.export import LocalRegions

I64 = NDArray[np.int64]


def tables_of(
    manifest: Manifest,
    regions: LocalRegions,
    region: I64,
    offset: I64,
    size: I64,
    slot: NDArray[np.int32],
) -> list[PieceTable]:
    """Source-side piece tables of some pieces of this rank, one per pair of dtypes."""
    width = offset.shape[1]
    owner = manifest.owner.unpack().astype(np.int64)
    origin = widen(manifest.offset.unpack().astype(np.int64), width, 0)
    strides = np.zeros((len(regions.tensors), width), np.int64)
    begin = np.zeros(len(regions.tensors), np.int64)
    for i, tensor in enumerate(regions.tensors):
        begin[i] = tensor.storage_offset()
        if tensor.dim():
            strides[i, width - tensor.dim() :] = tensor.stride()
    globals_ = np.zeros((len(manifest.tensors), width), np.int64)
    for i, spec in enumerate(manifest.tensors):
        if spec.shape:
            globals_[i, width - len(spec.shape) :] = contiguous_strides(spec.shape)
    local = [str(t.dtype).removeprefix("torch.") for t in regions.tensors]
    pairs: dict[tuple[str, str], list[int]] = {}
    for i, r in enumerate(region.tolist()):
        pairs.setdefault((local[r], manifest.tensors[int(owner[r])].dtype), []).append(i)
    storage = np.array(regions.storage, np.int32)
    out = []
    for (src, dst), members in pairs.items():
        at = np.array(members, np.int64)
        r = region[at]
        start = begin[r] + ((offset[at] - origin[r]) * strides[r]).sum(axis=1)
        index = globals_[owner[r]]
        out.append(
            PieceTable(
                src_dtype=src,
                dst_dtype=dst,
                shape=size[at],
                src_buffer=storage[r],
                src_offset=start,
                src_stride=strides[r],
                dst_buffer=storage[r],
                dst_offset=start,
                dst_stride=strides[r],
                index_offset=(offset[at] * index).sum(axis=1),
                index_stride=index,
                slot=slot[at],
            )
        )
    return out


def compile_hash(manifest: Manifest, regions: LocalRegions, task: HashTask) -> CompiledDigest:
    """Digest of what this rank contributes to one class of workers."""
    tables = tables_of(
        manifest,
        regions,
        task.region.unpack().astype(np.int64),
        task.offset.unpack().astype(np.int64),
        task.size.unpack().astype(np.int64),
        task.slot.unpack().astype(np.int32),
    )
    return _compile(tables, regions, task.slots)


def compile_replica_hash(manifest: Manifest, regions: LocalRegions) -> CompiledDigest:
    """One digest per owned region; replicas of a region must agree."""
    n = len(regions.tensors)
    width = manifest.offset.shape[1]
    tables = tables_of(
        manifest,
        regions,
        np.arange(n, dtype=np.int64),
        widen(manifest.offset.unpack().astype(np.int64), width, 0),
        widen(manifest.size.unpack().astype(np.int64), width, 1),
        np.arange(n, dtype=np.int32),
    )
    return _compile(tables, regions, n)


@dataclass(frozen=True)
class _Sum:
    """Digests of parts that lie on different kinds of device, added up."""

    parts: Sequence[CompiledDigest]

    def run(self) -> NDArray[np.uint64]:
        """Runs every part; uint64 ``[slots]``."""
        first, *others = [part.run() for part in self.parts]
        for values in others:
            first = first + values
        return first


def _compile(tables: list[PieceTable], regions: LocalRegions, slots: int) -> CompiledDigest:
    """Hashes each part of a rank's weights where it lies: on its GPU, or offloaded."""
    on_gpu = np.array([storage.is_cuda for storage in regions.storages], bool)
    if on_gpu.all() or not on_gpu.any():
        return compile_digest(tables, regions.storages, "src", slots)
    parts = []
    for chosen in (on_gpu, ~on_gpu):
        number = (np.cumsum(chosen) - 1).astype(np.int32)
        mine = [t.take(chosen[t.src_buffer]) for t in tables]
        mine = [
            replace(t, src_buffer=number[t.src_buffer], dst_buffer=number[t.src_buffer])
            for t in mine
        ]
        storages = [s for s, c in zip(regions.storages, chosen, strict=True) if c]
        parts.append(compile_digest(mine, storages, "src", slots))
    return _Sum(parts)
