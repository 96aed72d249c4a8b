"""Turns what a trainer rank holds into what the engine wants: values and scales, in units."""

from __future__ import annotations

from collections.abc import Iterable

from weight_sync.errors import QuantizationError, shorten
from weight_sync.layout import Box
from weight_sync.manifest import TensorSpec
from weight_sync.quantize.format import SOURCE_DTYPES, Format, block_of
from weight_sync.quantize.wanted import QuantSpec


def expand(
    tensors: Iterable[tuple[TensorSpec, Iterable[Box]]], wanted: Iterable[QuantSpec]
) -> list[tuple[TensorSpec, list[Box]]]:
    """Replaces each wanted tensor of a manifest by its value and its scale, in one unit.

    Args:
        tensors: What a trainer rank offers, and the regions it owns.
        wanted: What ``wanted.unite`` returned; names this rank does not know are left to others.

    Returns:
        Entries for ``build_manifest``. A region of a value comes with the region of its scale.

    Raises:
        QuantizationError: Naming every tensor whose dtype, shape, tie or cut does not allow it.
    """
    by_name = {spec.name: spec for spec in wanted}
    out: list[tuple[TensorSpec, list[Box]]] = []
    faults: list[str] = []
    for tensor, regions in tensors:
        boxes = list(regions)
        spec = by_name.get(tensor.name)
        if (spec is None) != (tensor.alias_of not in by_name) and tensor.alias_of:
            faults.append(
                f"{tensor.name} is tied to {tensor.alias_of}, and only one of them is wanted "
                "quantized: want both or neither"
            )
        elif spec is None:
            out.append((tensor, boxes))
        elif fault := _unfit(tensor, spec) or _cut(spec, boxes):
            faults.append(fault)
        else:
            base = by_name.get(tensor.alias_of)
            unit = spec.value_name
            value = TensorSpec(
                spec.value_name,
                spec.value_dtype,
                spec.value_shape,
                base.value_name if base else "",
                unit,
            )
            scale = TensorSpec(
                spec.scale_name,
                spec.scale_dtype,
                spec.scale_shape,
                base.scale_name if base else "",
                unit,
            )
            out.append((value, boxes))
            out.append((scale, [scale_box(spec.format, box) for box in boxes]))
    if faults:
        raise QuantizationError(
            f"{len(faults)} tensors cannot be quantized as the engine wants: "
            f"{shorten(faults)}. Nothing was sent"
        )
    return out


def scale_box(form: Format, box: Box) -> Box:
    """The region of the scale that belongs to an uncut region of the value.

    Ranks that own parts of one FP8-per-tensor matrix all get its whole scale: they must agree on
    the maximum before they cast (``work.CompiledFp8Tensor.amax``).
    """
    block = block_of(form)
    if block is None:
        return Box(box.offset[:-2], box.size[:-2])
    ends = [o + n for o, n in zip(box.offset[-2:], box.size[-2:], strict=True)]
    first = tuple(o // b for o, b in zip(box.offset[-2:], block, strict=True))
    last = [-(-e // b) for e, b in zip(ends, block, strict=True)]
    size = tuple(e - o if n else 0 for e, o, n in zip(last, first, box.size[-2:], strict=True))
    return Box((*box.offset[:-2], *first), (*box.size[:-2], *size))


def shares_scale(spec: QuantSpec, box: Box) -> bool:
    """Whether a region is only a part of what one scale covers, so that ranks must agree on it."""
    return spec.format is Format.FP8_TENSOR and box.size[-2:] != spec.value_shape[-2:]


def _unfit(tensor: TensorSpec, spec: QuantSpec) -> str:
    if tensor.shape != spec.value_shape:
        return (
            f"{tensor.name} has shape {list(tensor.shape)} here and {list(spec.value_shape)} in "
            "the engine"
        )
    if tensor.dtype not in SOURCE_DTYPES:
        return f"{tensor.name} is {tensor.dtype}, and {' or '.join(SOURCE_DTYPES)} is needed"
    return ""


def _cut(spec: QuantSpec, boxes: Iterable[Box]) -> str:
    """Describes every place where regions cut a block, and the nearest places that do not."""
    block = block_of(spec.format)
    if block is None:
        return ""
    advice = set()
    for box in boxes:
        for d in (-2, -1):
            length, step = spec.value_shape[d], block[d]
            for at in (box.offset[d], box.offset[d] + box.size[d]):
                if box.elements and at % step and at != length:
                    below, above = at // step * step, min(-(-at // step) * step, length)
                    dim = "N" if d == -2 else "K"
                    advice.add(f"move the cut at {dim}={at} to {below} or {above}")
    if not advice:
        return ""
    return (
        f"{spec.name}: a shard cuts a {spec.format} block of {block[0]}x{block[1]} ("
        f"{'; '.join(sorted(advice))}, by exchanging that edge with the neighbouring rank)"
    )
