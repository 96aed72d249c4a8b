"""Who agrees to what: the engine names what it wants quantized, the trainer obeys, both check.

1. Every engine worker states a ``QuantSpec`` per name that its built model holds quantized, and
   ``wanted.unite`` joins them over pipeline stages.
2. Each trainer rank turns its tensors into values and scales with ``expand.expand``.
3. The engine compares what the trainers offer with what it asked for: :func:`check_offer`.
4. Whoever cut buckets proves that no pair was separated: :func:`check_buckets`.

All of it happens on names and shapes, before a byte moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from weight_sync.errors import QuantizationError, shorten
from weight_sync.manifest import TensorSpec
from weight_sync.quantize.format import SCALE_SUFFIXES
from weight_sync.quantize.wanted import QuantSpec

# A scale that nobody asked for is known by its name; attention's k_scale and v_scale are not these.
_SCALE_NAMES = tuple(f".weight{suffix}" for suffix in SCALE_SUFFIXES)


def check_offer(offered: Iterable[TensorSpec], wanted: Iterable[QuantSpec]) -> None:
    """Compares what trainers offer with what the engine asked for.

    Args:
        offered: All tensors of all trainer ranks, e.g. ``Catalogue.tensors``.
        wanted: What ``wanted.unite`` returned.

    Raises:
        QuantizationError: If anything quantized was not asked for, a value comes without its scale
            or a scale without its value, a dtype or shape is another, or the two are not one unit.
    """
    tensors = {t.name: t for t in offered}
    members: dict[str, set[str]] = {}
    for tensor in tensors.values():
        members.setdefault(tensor.unit, set()).add(tensor.name)
    faults: list[str] = []
    asked: set[str] = set()
    for spec in wanted:
        asked |= {spec.value_name, spec.scale_name}
        value, scale = tensors.get(spec.value_name), tensors.get(spec.scale_name)
        if value is None or scale is None:
            missing = spec.scale_name if value is not None else spec.value_name
            faults.append(f"{spec.name}: {missing} is missing")
            continue
        parts = (
            (value, spec.value_dtype, spec.value_shape),
            (scale, spec.scale_dtype, spec.scale_shape),
        )
        faults += [
            f"{t.name}: {dtype} {list(shape)} was asked for, {t.dtype} {list(t.shape)} is offered"
            for t, dtype, shape in parts
            if (t.dtype, t.shape) != (dtype, shape)
        ]
        if not value.unit or members[value.unit] != {spec.value_name, spec.scale_name}:
            faults.append(f"{spec.name}: value and scale are not one unit of their own")
    faults += [
        f"{t.name}: {t.dtype} is offered but was not asked for"
        for t in tensors.values()
        if t.name not in asked and (t.dtype.startswith("float8_") or t.name.endswith(_SCALE_NAMES))
    ]
    if faults:
        raise QuantizationError(
            "the trainer's quantized tensors are not what the engine asked for: "
            f"{shorten(faults)}. Nothing was changed. Pass the engine's wanted names to every "
            "trainer rank and build the manifests again"
        )


def check_buckets(buckets: Iterable[Collection[str]], wanted: Iterable[QuantSpec]) -> None:
    """Checks that no bucket holds one of a pair without the other.

    Raises:
        QuantizationError: Naming the tensors whose value and scale were separated.
    """
    partner: dict[str, str] = {}
    for spec in wanted:
        partner |= {spec.value_name: spec.scale_name, spec.scale_name: spec.value_name}
    split = {
        name
        for bucket in buckets
        for name in bucket
        if name in partner and partner[name] not in bucket
    }
    if split:
        raise QuantizationError(
            f"buckets separate values from their scales: {shorten(split)}. Cut buckets between "
            "units, never inside one"
        )
