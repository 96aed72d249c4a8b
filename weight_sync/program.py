"""What one rank runs every refit: its part of the plan, as arrays that travel once per epoch."""

from __future__ import annotations

import msgspec

from weight_sync.arrays import PackedArray


class ReceiverProgram(msgspec.Struct, frozen=True):
    """The part of one engine worker.

    Attributes:
        epoch: Membership epoch.
        plan_digest: Must equal every other participant's.
        worker: Dense worker index in the membership.
        class_id: Workers of one class need exactly the same slices.
        slice: int32 ``[n]``, index into the worker's own recording.
        sender: int32 ``[n]``, trainer rank that serves the piece.
        region: int32 ``[n]``, number of the region in that rank's manifest.
        offset: int64 ``[n, R]``, global offset of the piece.
        size: int64 ``[n, R]``.
        unit: int32 ``[n]``, pieces with equal unit >= 0 travel in one bucket.
        wire_dtype: dtype per recording source, as the trainer sends it.
        bucket_bytes: Size at which packed transports cut buckets.
    """

    epoch: int
    plan_digest: str
    worker: int
    class_id: int
    slice: PackedArray
    sender: PackedArray
    region: PackedArray
    offset: PackedArray
    size: PackedArray
    unit: PackedArray
    wire_dtype: tuple[str, ...]
    bucket_bytes: int


class HashTask(msgspec.Struct, frozen=True):
    """What one trainer rank hashes on behalf of one class of workers.

    Attributes:
        class_id: The class.
        slots: Number of digest slots of the class's recording.
        slot: int32 ``[n]``, slot each piece adds to.
        region: int32 ``[n]``, number of the region in this rank's manifest.
        offset: int64 ``[n, R]``.
        size: int64 ``[n, R]``.
    """

    class_id: int
    slots: int
    slot: PackedArray
    region: PackedArray
    offset: PackedArray
    size: PackedArray


class SendTask(msgspec.Struct, frozen=True):
    """What one trainer rank packs for one worker, in the receiver's order.

    Attributes:
        worker: Dense worker index.
        region: int32 ``[n]``, number of the region in this rank's manifest.
        offset: int64 ``[n, R]``.
        size: int64 ``[n, R]``.
        unit: int32 ``[n]``.
    """

    worker: int
    region: PackedArray
    offset: PackedArray
    size: PackedArray
    unit: PackedArray


class SenderProgram(msgspec.Struct, frozen=True):
    """The part of one trainer rank.

    Attributes:
        epoch: Membership epoch.
        plan_digest: Must equal every other participant's.
        rank: Trainer rank.
        hashes: One task per class this rank contributes bytes to.
        sends: One task per worker this rank serves, in the receiver's order.
        bucket_bytes: Size at which packed transports cut buckets.
    """

    epoch: int
    plan_digest: str
    rank: int
    hashes: tuple[HashTask, ...]
    sends: tuple[SendTask, ...]
    bucket_bytes: int


class BroadcastSends(msgspec.Struct, frozen=True):
    """What one trainer rank packs for broadcasts.

    Attributes:
        root: int32 ``[buckets]``, trainer rank that sends each bucket; the same for everybody.
        nbytes: int64 ``[buckets]``.
        region: int32 ``[n]``, number of the region in this rank's manifest.
        offset: int64 ``[n, R]``.
        size: int64 ``[n, R]``.
        bucket: int32 ``[n]``, ascending.
        start: int64 ``[n]``, byte offset in the bucket.
    """

    root: PackedArray
    nbytes: PackedArray
    region: PackedArray
    offset: PackedArray
    size: PackedArray
    bucket: PackedArray
    start: PackedArray


class BroadcastKeeps(msgspec.Struct, frozen=True):
    """What one worker keeps of broadcasts.

    Attributes:
        root: int32 ``[buckets]``, trainer rank that sends each bucket; the same for everybody.
        nbytes: int64 ``[buckets]``.
        row: int32 ``[n]``, piece of the worker's program.
        bucket: int32 ``[n]``, where this part of it comes.
        start: int64 ``[n]``, element offset in the bucket.
        stride: int64 ``[n, R]``, element strides in the bucket.
        offset: int64 ``[n, R]``, global offset of the part.
        size: int64 ``[n, R]``.
    """

    root: PackedArray
    nbytes: PackedArray
    row: PackedArray
    bucket: PackedArray
    start: PackedArray
    stride: PackedArray
    offset: PackedArray
    size: PackedArray
