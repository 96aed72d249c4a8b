"""Turns what loaders did into a recording: modes decided, coverage checked, nothing left over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weight_sync.arrays import pack
from weight_sync.errors import CoverageError
from weight_sync.layout import contiguous_strides, full_box
from weight_sync.manifest import TensorSpec, pad_boxes
from weight_sync.plan import matches
from weight_sync.recording import ParameterSpec, Recording, SourceSpec, UnitSpec
from weight_sync.strided import MappedBox, StridedView
from weight_sync.worker.coverage import covered
from weight_sync.worker.model import EngineModel, LoadingView, Mode, UnitView
from weight_sync.worker.record import (
    ParameterKey,
    RawRecording,
    RecordedFill,
    RecordedSlice,
    record,
)

# Unit name and attribute.
_Named = tuple[str, str]
# Loader units receive whole checkpoint tensors under this attribute prefix.
WHOLE = "@"


@dataclass(frozen=True)
class WorkerRecording:
    """A recording plus what only this worker needs to install from it.

    Attributes:
        recording: What travels to the planner.
        fills: Constants per unit name.
    """

    recording: Recording
    fills: Mapping[str, tuple[RecordedFill, ...]]


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def make_recording(
    model: EngineModel, offers: Sequence[TensorSpec], not_trained: Sequence[str]
) -> WorkerRecording:
    """Records, probes and checks one worker.

    Args:
        model: The engine's model.
        offers: Every tensor the trainer has.
        not_trained: Names or ``prefix*`` of engine parameters that keep their values.

    Raises:
        CoverageError: Listing parameters nothing wrote, tensors whose shape loaders refuse, and
            separate tensors for what the engine keeps as one.
    """
    # Asked for before the swap: in loading layout no tensor has an address.
    tied = _tied(model)
    with model.loading_view() as view:
        raw = record_offers(view, offers)
        units = view.units
        contradicting = _follow_owners(units, raw, tied, offers, not_trained)
        missing = _unwritten(units, raw, tied, not_trained)
    if missing or contradicting:
        raise CoverageError(unwritten=missing, disagreeing=contradicting)
    used = sorted({s.parameter.unit for s in raw.slices} | set(raw.touched))
    modes = model.probe(units[u].name for u in used if u not in raw.unreadable)
    modes |= {units[u].name: Mode("loader", why) for u, why in raw.unreadable.items()}
    return _assemble(units, used, modes, raw, offers)


def record_offers(view: LoadingView, offers: Sequence[TensorSpec]) -> RawRecording:
    """Records what loaders read of the offers, without deciding modes.

    Raises:
        CoverageError: Listing every tensor that a loader refused.
    """
    refused: dict[int, str] = {}
    while True:
        handed_out: list[int] = []
        kept = [i for i in range(len(offers)) if i not in refused]
        try:
            raw = record(view, [offers[i] for i in kept], notify=handed_out.append)
        except Exception as error:
            if not handed_out or len(refused) >= 64:
                raise
            culprit = kept[handed_out[-1]]
            spec = offers[culprit]
            refused[culprit] = (
                f"{spec.name}: trainer has {spec.dtype} {list(spec.shape)}, the engine's loader "
                f"said {type(error).__name__}: {error}"
            )
            continue
        if refused:
            raise CoverageError(disagreeing=refused.values())
        return raw


def _tied(model: EngineModel) -> dict[_Named, _Named]:
    """Live tensors that are an earlier unit's: (unit, attribute) -> its owner's."""
    tied: dict[_Named, _Named] = {}
    for unit, owner in model.shared_with().items():
        owned = {t.data_ptr(): name for name, t in model.live(owner).items() if t.numel()}
        for name, tensor in model.live(unit).items():
            if tensor.numel() and tensor.data_ptr() in owned:
                tied[unit, name] = owner, owned[tensor.data_ptr()]
    return tied


def _follow_owners(
    units: Sequence[UnitView],
    raw: RawRecording,
    tied: Mapping[_Named, _Named],
    offers: Sequence[TensorSpec],
    not_trained: Sequence[str],
) -> list[str]:
    """Drops writes to tied parameters whose owner is written too; both are one piece of memory.

    What another unit derives from it (a packed head) is made again from the owner after the
    install.

    Returns:
        Tied parameters for which the trainer has a tensor of its own, not tied and not declared.
    """
    number = {unit.name: i for i, unit in enumerate(units)}
    group = [spec.alias_of or spec.name for spec in offers]
    written: dict[ParameterKey, set[int]] = {}
    for s in raw.slices:
        written.setdefault(s.parameter, set()).add(s.source)
    dropped: set[ParameterKey] = set()
    contradicting = []
    for key, sources in written.items():
        owner, attribute = tied.get((units[key.unit].name, key.attribute), ("", ""))
        owned = written.get(ParameterKey(number[owner], attribute)) if owner else None
        if owned is None:
            continue
        dropped.add(key)
        groups = {group[s] for s in owned}
        for source in sources:
            name = offers[source].name
            if group[source] not in groups and not matches(name, not_trained):
                contradicting.append(
                    f"{name} is a tensor of its own, but the engine ties "
                    f"{units[key.unit].name}.{key.attribute} to {owner}.{attribute} (tie them "
                    "in the trainer, or declare it as not_trained)"
                )
    raw.slices[:] = [s for s in raw.slices if s.parameter not in dropped]
    raw.fills[:] = [f for f in raw.fills if f.parameter not in dropped]
    kept = {s.parameter.unit for s in raw.slices} | set(raw.unreadable)
    for unit in {key.unit for key in dropped} - kept:
        raw.touched.pop(unit, None)
    return contradicting


def _unwritten(
    units: Sequence[UnitView],
    raw: RawRecording,
    tied: Mapping[_Named, _Named],
    not_trained: Sequence[str],
) -> list[str]:
    """Parameters of which at least one element is written by nobody, with how many."""
    views: dict[ParameterKey, list[StridedView]] = {}
    for s in raw.slices:
        m = s.mapped
        views.setdefault(s.parameter, []).append(
            StridedView(m.dst_offset, m.box.size, m.dst_stride)
        )
    for f in raw.fills:
        views.setdefault(f.parameter, []).append(f.view)
    # An owner is written through any of the parameters that are tied to it.
    reached = {tied.get((units[key.unit].name, key.attribute)) for key in views}
    missing = []
    for number, unit in enumerate(units):
        for attribute, tensor in unit.tensors.items():
            key = ParameterKey(number, attribute)
            if key in raw.computed:
                continue
            name = f"{unit.name}.{attribute}" if unit.name else attribute
            writes = views.get(key, [])
            if attribute in unit.optional and not writes:
                continue
            me = (unit.name, attribute)
            if not writes and (me in tied or me in reached):
                continue
            total = covered(writes)
            if total < tensor.numel() and not matches(name, not_trained):
                missing.append(f"{name} ({total} of {tensor.numel()} elements written)")
    return missing


def _assemble(
    units: Sequence[UnitView],
    used: Sequence[int],
    modes: Mapping[str, Mode],
    raw: RawRecording,
    offers: Sequence[TensorSpec],
) -> WorkerRecording:
    unit_number = {u: i for i, u in enumerate(used)}
    slices = [s for s in raw.slices if s.parameter.unit not in raw.unreadable]
    for unit in sorted(raw.unreadable):
        for source in sorted(raw.touched.get(unit, ())):
            shape = offers[source].shape
            whole = MappedBox(full_box(shape), 0, contiguous_strides(shape))
            slices.append(RecordedSlice(source, ParameterKey(unit, f"{WHOLE}{source}"), whole))
    slices.sort(key=lambda s: unit_number[s.parameter.unit])
    # Tensors without elements have no slice, but a loader took them all the same.
    taken = {s.source for s in slices} | {i for i in raw.read if 0 in offers[i].shape}
    source_number = {s: i for i, s in enumerate(sorted(taken))}
    parameters: dict[ParameterKey, int] = {}
    specs: list[ParameterSpec] = []
    slots: dict[tuple[int, int], int] = {}
    columns: list[tuple[int, int, int]] = []
    for s in slices:
        if s.parameter not in parameters:
            parameters[s.parameter] = len(specs)
            specs.append(_parameter_spec(units, unit_number, s, offers))
        source, unit = source_number[s.source], unit_number[s.parameter.unit]
        slot = slots.setdefault((source, unit), len(slots))
        columns.append((source, parameters[s.parameter], slot))
    width = max((len(s.mapped.box.size) for s in slices), default=1) or 1
    offset, size = pad_boxes([s.mapped.box for s in slices], width)
    stride = np.zeros((len(slices), width), np.int64)
    for i, s in enumerate(slices):
        if s.mapped.dst_stride:
            stride[i, width - len(s.mapped.dst_stride) :] = s.mapped.dst_stride
    table = np.array(columns, np.int32).reshape(len(columns), 3)
    fills: dict[str, list[RecordedFill]] = {}
    for fill in raw.fills:
        fills.setdefault(units[fill.parameter.unit].name, []).append(fill)
    recording = Recording(
        sources=tuple(
            SourceSpec(offers[s].name, offers[s].dtype, offers[s].shape) for s in source_number
        ),
        parameters=tuple(specs),
        units=tuple(
            UnitSpec(units[u].name, modes[units[u].name].name, modes[units[u].name].reason)
            for u in used
        ),
        source=pack(table[:, 0]),
        parameter=pack(table[:, 1]),
        offset=pack(offset),
        size=pack(size),
        dst_offset=pack(np.array([s.mapped.dst_offset for s in slices], np.int64)),
        dst_stride=pack(stride),
        slot=pack(table[:, 2]),
        slot_source=pack(np.array([source for source, _ in slots], np.int32)),
    )
    return WorkerRecording(recording, {k: tuple(v) for k, v in fills.items()})


def _parameter_spec(
    units: Sequence[UnitView],
    unit_number: Mapping[int, int],
    s: RecordedSlice,
    offers: Sequence[TensorSpec],
) -> ParameterSpec:
    unit = units[s.parameter.unit]
    name = f"{unit.name}.{s.parameter.attribute}" if unit.name else s.parameter.attribute
    if s.parameter.attribute.startswith(WHOLE):
        spec = offers[s.source]
        return ParameterSpec(name, spec.dtype, spec.shape, unit_number[s.parameter.unit])
    tensor = unit.tensors[s.parameter.attribute]
    return ParameterSpec(
        name, _dtype_name(tensor), tuple(tensor.shape), unit_number[s.parameter.unit]
    )
