"""What one engine worker's loaders read and write: source slice -> parameter slice.

A recording is made by running the engine's own loader on storage-less tensors
(``worker/record.py``). It contains no data and no addresses, so workers with the same slices have
equal recordings, and the plan is computed once for all of them.
"""

from __future__ import annotations

import hashlib

import msgspec

from weight_sync.arrays import PackedArray


class ParameterSpec(msgspec.Struct, frozen=True, array_like=True):
    """A destination that loaders write.

    Attributes:
        name: Qualified name of the parameter in the engine's model.
        dtype: torch dtype name.
        shape: Loading-format shape.
        unit: Index of the install unit (module) it belongs to.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    unit: int


class UnitSpec(msgspec.Struct, frozen=True, array_like=True):
    """A module that is installed as a whole.

    Attributes:
        name: Qualified module name.
        mode: ``direct``, ``processed`` or ``loader``.
        reason: Why it is not direct; empty for direct.
    """

    name: str
    mode: str
    reason: str = ""


class SourceSpec(msgspec.Struct, frozen=True, array_like=True):
    """A checkpoint tensor as the loader saw it."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Recording(msgspec.Struct, frozen=True):
    """Everything one worker needs from the trainer.

    Attributes:
        sources: Checkpoint tensors that loaders read at least one element of.
        parameters: Destinations.
        units: Modules with their install mode.
        source: int32 ``[n]``, index into ``sources`` per slice.
        parameter: int32 ``[n]``, index into ``parameters`` per slice.
        offset: int64 ``[n, R]`` source region offsets (left-padded with 0).
        size: int64 ``[n, R]`` source region sizes (left-padded with 1).
        dst_offset: int64 ``[n]``, element offset in the parameter's storage.
        dst_stride: int64 ``[n, R]``, destination strides in elements.
        slot: int32 ``[n]``, digest slot of each slice; slices of one source in one unit share one.
        slot_source: int32 ``[slots]``, index into ``sources`` per digest slot.
    """

    sources: tuple[SourceSpec, ...]
    parameters: tuple[ParameterSpec, ...]
    units: tuple[UnitSpec, ...]
    source: PackedArray
    parameter: PackedArray
    offset: PackedArray
    size: PackedArray
    dst_offset: PackedArray
    dst_stride: PackedArray
    slot: PackedArray
    slot_source: PackedArray

    def digest(self) -> str:
        """Equal for workers that need exactly the same slices."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).hexdigest()
