"""Manifests and recordings of the plan benchmark, made from shapes without any tensor or engine.

The trainer cuts as Megatron does (or FSDP2 on top), the engine as vLLM's loaders do. What engines
fuse does not matter to a plan, so every slice gets a parameter of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from bench.parallelism import Parallelism
from bench.plan_model import ModelShape, ModelTensor
from weight_sync.arrays import pack
from weight_sync.errors import ConfigError
from weight_sync.layout import Box, chunk_range, contiguous_strides
from weight_sync.manifest import Manifest, TensorSpec, build_manifest, pad_boxes
from weight_sync.recording import ParameterSpec, Recording, SourceSpec, UnitSpec

# Megatron pads vocabularies to a multiple of this per tensor parallel rank, vLLM to this in all.
_TRAINER_PADDING = 128
_ENGINE_PADDING = 64

Owned = tuple[ModelTensor, Box]


def manifests(model: ModelShape, trainer: Parallelism) -> list[Manifest]:
    """One manifest per trainer rank, numbered as Megatron does: tp, then fsdp, dp, pp."""
    if trainer.fsdp > 1 and trainer.ep > 1:
        raise ConfigError("fsdp together with ep is not modelled; use dp for replicas instead")
    specs = {t.name: TensorSpec(t.name, t.dtype, t.shape) for t in model.tensors}
    stage_ranks = trainer.ranks // trainer.pp
    known: dict[tuple[int, ...], Manifest] = {}
    out = []
    for rank in range(trainer.ranks):
        stage, inside = divmod(rank, stage_ranks)
        tp, ep = inside % trainer.tp, inside % trainer.ep
        shard = inside // trainer.tp % trainer.fsdp
        place = (stage, tp, ep, shard)
        if place not in known:
            layers = range(*_span(*chunk_range(model.layers, trainer.pp, stage)))
            owned = _trainer_boxes(model, trainer, layers, tp, ep, shard)
            known[place] = build_manifest(
                rank, "", "cpu", [(specs[t.name], [box]) for t, box in owned]
            )
        out.append(msgspec.structs.replace(known[place], rank=rank))
    return out


def recordings(model: ModelShape, engine: Parallelism) -> list[Recording]:
    """One recording per engine worker, shard by shard; equal workers share one object."""
    known: dict[tuple[int, ...], Recording] = {}
    out = []
    for shard in range(engine.dp):
        for stage in range(engine.pp):
            for tp in range(engine.tp):
                ep = (shard * engine.tp + tp) % engine.ep
                place = (stage, tp, ep)
                if place not in known:
                    known[place] = _recording(_engine_boxes(model, engine, *place))
                out.append(known[place])
    return out


def _span(start: int, count: int) -> tuple[int, int]:
    return start, start + count


def _trainer_boxes(
    model: ModelShape, trainer: Parallelism, layers: range, tp: int, ep: int, shard: int
) -> list[Owned]:
    out = []
    for tensor in model.stage(layers):
        if tensor.expert is not None and trainer.ep > 1:
            start, count = chunk_range(model.experts, trainer.ep, ep)
            if not start <= tensor.expert < start + count:
                continue
            box = tensor.box(1, 0, 1)
        else:
            box = tensor.box(trainer.tp, tp, _TRAINER_PADDING * trainer.tp)
        begin, size = chunk_range(box.size[0], trainer.fsdp, shard)
        box = Box((box.offset[0] + begin, *box.offset[1:]), (size, *box.size[1:]))
        if box.elements:
            out.append((tensor, box))
    return out


def _engine_boxes(
    model: ModelShape, engine: Parallelism, stage: int, tp: int, ep: int
) -> list[Owned]:
    # vLLM gives the remainder of layers to the last stages but one, that of experts to first ranks.
    counts = [model.layers // engine.pp] * engine.pp
    for i in range(2, model.layers % engine.pp + 2):
        counts[-i] += 1
    layers = range(*_span(sum(counts[:stage]), counts[stage]))
    each, more = divmod(model.experts, engine.ep)
    mine = range(ep * each + min(ep, more), (ep + 1) * each + min(ep + 1, more))
    out = []
    for tensor in model.stage(layers):
        if tensor.expert is not None and engine.ep > 1:
            if tensor.expert in mine:
                out.append((tensor, tensor.box(1, 0, 1)))
            continue
        box = tensor.box(engine.tp, tp, _ENGINE_PADDING)
        if box.elements:
            out.append((tensor, box))
    return out


def _recording(slices: Sequence[Owned]) -> Recording:
    width = max(len(box.size) for _, box in slices)
    offset, size = pad_boxes([box for _, box in slices], width)
    strides = np.zeros_like(size)
    for i, (_, box) in enumerate(slices):
        strides[i, width - len(box.size) :] = contiguous_strides(box.size)
    numbers = pack(np.arange(len(slices), dtype=np.int32))
    return Recording(
        sources=tuple(SourceSpec(t.name, t.dtype, t.shape) for t, _ in slices),
        parameters=tuple(ParameterSpec(t.name, t.dtype, box.size, 0) for t, box in slices),
        units=(UnitSpec("model", "direct"),),
        source=numbers,
        parameter=numbers,
        offset=pack(offset),
        size=pack(size),
        dst_offset=pack(np.zeros(len(slices), np.int64)),
        dst_stride=pack(strides),
        slot=numbers,
        slot_source=numbers,
    )
