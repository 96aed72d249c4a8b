"""What an engine wants quantized: one statement per tensor, united over pipeline stages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from weight_sync.errors import QuantizationError, shorten
from weight_sync.quantize.format import (
    SCALE_SUFFIXES,
    VALUE_DTYPE,
    Format,
    scale_dtype,
    scale_shape,
    scale_suffix,
)


class QuantSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor that an engine wants quantized.

    Attributes:
        name: Checkpoint name of the tensor as the trainer holds it.
        format: How it is quantized.
        value_name: Checkpoint name of the E4M3 values; also the id of the unit both travel in.
        scale_name: Checkpoint name of the scales.
        value_shape: Global shape ``[..., N, K]``.
        scale_shape: Global shape that ``format.scale_shape`` gives for it.
        value_dtype: torch dtype name of the values.
        scale_dtype: torch dtype name of the scales.
    """

    name: str
    format: Format
    value_name: str
    scale_name: str
    value_shape: tuple[int, ...]
    scale_shape: tuple[int, ...]
    value_dtype: str
    scale_dtype: str

    def __post_init__(self) -> None:
        shape = scale_shape(self.format, self.value_shape, self.name)
        stated = (self.scale_shape, self.scale_dtype, self.value_dtype)
        if stated != (shape, scale_dtype(self.format), VALUE_DTYPE):
            raise QuantizationError(
                f"{self.name}: a {self.format} value of shape {list(self.value_shape)} is "
                f"{VALUE_DTYPE} with a {scale_dtype(self.format)} scale of shape {list(shape)}, "
                f"not {self.value_dtype} with {self.scale_dtype} {list(self.scale_shape)}. Engine "
                "and trainer must run the same format"
            )


def want(name: str, form: Format, shape: Sequence[int], suffix: str | None = None) -> QuantSpec:
    """States one wanted tensor.

    Args:
        name: Checkpoint name, e.g. ``"model.layers.0.mlp.up_proj.weight"``.
        form: The format.
        shape: Global shape.
        suffix: What makes the scale's name, where the engine loads it by another than usual.

    Raises:
        QuantizationError: If the format cannot hold the shape or the suffix is unknown.
    """
    suffix = scale_suffix(form) if suffix is None else suffix
    if suffix not in SCALE_SUFFIXES:
        raise QuantizationError(
            f"scale suffix {suffix!r} of {name} is not one of {', '.join(SCALE_SUFFIXES)}"
        )
    return QuantSpec(
        name=name,
        format=form,
        value_name=name,
        scale_name=name + suffix,
        value_shape=tuple(shape),
        scale_shape=scale_shape(form, shape, name),
        value_dtype=VALUE_DTYPE,
        scale_dtype=scale_dtype(form),
    )


def unite(stages: Iterable[Iterable[QuantSpec]]) -> tuple[QuantSpec, ...]:
    """What all pipeline stages together want, sorted by name.

    Raises:
        QuantizationError: If stages want the same name in different ways.
    """
    known: dict[str, QuantSpec] = {}
    conflicts = set()
    for stage in stages:
        for spec in stage:
            if known.setdefault(spec.name, spec) != spec:
                conflicts.add(spec.name)
    if conflicts:
        raise QuantizationError(
            f"pipeline stages want {len(conflicts)} tensors in different formats or shapes: "
            f"{shorten(conflicts)}. Start every worker with the same quantization config"
        )
    return tuple(known[name] for name in sorted(known))


def unite_shards(shards: Mapping[int, Iterable[Iterable[QuantSpec]]]) -> tuple[QuantSpec, ...]:
    """What all shards want, sorted by name; replicas of one engine must want the same.

    Args:
        shards: Shard -> what each of its workers wants.

    Raises:
        QuantizationError: If workers or shards want a tensor in different ways.
    """
    each = {shard: unite(workers) for shard, workers in shards.items()}
    if not each:
        return ()
    first = min(each)
    for shard, specs in each.items():
        if odd := {spec.name for spec in set(specs) ^ set(each[first])}:
            raise QuantizationError(
                f"shards {first} and {shard} want {len(odd)} tensors quantized differently: "
                f"{shorten(odd)}. Start all shards with the same quantization config"
            )
    return each[first]
