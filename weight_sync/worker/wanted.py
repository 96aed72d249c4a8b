"""Says which tensors an engine holds quantized, and how: found by running its own loaders.

No table of models or of quantization schemes is needed. Whatever the trainer offers is recorded as
usual; a tensor that a loader copies into an E4M3 parameter is wanted quantized, and dtype and shape
of the scale parameter beside it tell the format. Engines that load bf16 and quantize by themselves
have no E4M3 parameters in loading layout, so they want nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from weight_sync.errors import QuantizationError, shorten
from weight_sync.manifest import TensorSpec
from weight_sync.quantize.format import MX_BLOCK, TILE, Format
from weight_sync.quantize.wanted import QuantSpec, want
from weight_sync.worker.model import EngineModel, UnitView
from weight_sync.worker.record import ParameterKey
from weight_sync.worker.recorded import record_offers

# Where an engine keeps a canonical scale beside a shuffled one, loaders write the canonical one.
_SUFFIXES = ("_scale_from_checkpoint", "_scale_inv", "_scale")


def wanted_names(model: EngineModel, offers: Sequence[TensorSpec]) -> tuple[QuantSpec, ...]:
    """What one worker wants quantized of the tensors a trainer offers.

    Args:
        model: The engine's model.
        offers: Every tensor the trainer has, unquantized.

    Returns:
        One statement per checkpoint name, sorted.

    Raises:
        QuantizationError: If the engine holds E4M3 values in a format that cannot be sent, naming
            the parameters.
        CoverageError: If loaders refuse an offered tensor.
    """
    with model.loading_view() as view:
        units = view.units
        if not any(_is_e4m3(t) for unit in units for t in unit.tensors.values()):
            return ()
        raw = record_offers(view, offers)
    unknown = {
        f"{units[u].name} ({why})"
        for u, why in raw.unreadable.items()
        if any(_is_e4m3(t) for t in units[u].tensors.values())
    }
    targets: dict[int, set[ParameterKey]] = {}
    for written in raw.slices:
        key = written.parameter
        if _is_e4m3(units[key.unit].tensors[key.attribute]):
            targets.setdefault(written.source, set()).add(key)
    formats: dict[ParameterKey, tuple[Format, str]] = {}
    for key in {key for keys in targets.values() for key in keys}:
        found = _format_of(units[key.unit], key.attribute)
        if isinstance(found, str):
            unknown.add(found)
        else:
            formats[key] = found
    if unknown:
        raise QuantizationError(
            f"the engine holds weights in formats that trainers cannot make: {shorten(unknown)}. "
            "Known are MXFP8 (uint8 scales of 32 along K), FP8 with one float32 scale per matrix "
            "and FP8 with float32 scales of 128x128 blocks; otherwise start the engine from bf16 "
            "weights with online quantization"
        )
    specs: dict[str, QuantSpec] = {}
    for source, keys in targets.items():
        offer = offers[source]
        for form, suffix in {formats[key] for key in keys}:
            spec = want(offer.name, form, offer.shape, suffix)
            if specs.setdefault(offer.name, spec) != spec:
                raise QuantizationError(
                    f"the engine loads {offer.name} into parameters of different formats; start it "
                    "with one quantization config for all of them"
                )
    return tuple(specs[name] for name in sorted(specs))


def _is_e4m3(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float8_e4m3fn


def _format_of(unit: UnitView, attribute: str) -> tuple[Format, str] | str:
    """Format and scale suffix of an E4M3 parameter, or a description of what is not known."""
    value = unit.tensors[attribute]
    suffix = next((s for s in _SUFFIXES if attribute + s in unit.tensors), None)
    name = f"{unit.name}.{attribute}"
    if suffix is None:
        return f"{name} has no scale"
    scale = unit.tensors[attribute + suffix]
    form = format_by_scale(value.shape, scale)
    if form is None:
        dtype = str(scale.dtype).removeprefix("torch.")
        return f"{name} {list(value.shape)} has a {dtype} scale {list(scale.shape)}"
    return form, suffix


def format_by_scale(shape: Sequence[int], scale: torch.Tensor) -> Format | None:
    """The format of a value that has a given scale, both in a worker's loading layout.

    Args:
        shape: ``[..., N, K]``; N may be several checkpoint tensors fused.
        scale: The scale parameter; only dtype and shape are looked at.

    Returns:
        None if it is none of the formats.
    """
    if len(shape) < 2:
        return None
    *lead, rows, cols = shape
    found = tuple(scale.shape)
    if scale.dtype == torch.uint8 and found == (*lead, rows, cols // MX_BLOCK):
        return Format.MXFP8
    if scale.dtype != torch.float32:
        return None
    if found == (*lead, -(-rows // TILE), -(-cols // TILE)):
        return Format.FP8_BLOCK
    # One scale per matrix that was fused, if the engine fuses any: [E], [E, 2], [1] or [3].
    fused = found[len(lead) :]
    if found[: len(lead)] == tuple(lead) and len(fused) <= 1 and prod(fused) < rows:
        return Format.FP8_TENSOR
    return None
