"""Everything that travels between synchronizer, trainer ranks and engine workers."""

from __future__ import annotations

import msgspec

from weight_sync.arrays import PackedArray
from weight_sync.comm.rendezvous import Rendezvous
from weight_sync.manifest import Manifest, TensorSpec
from weight_sync.program import (
    BroadcastKeeps,
    BroadcastSends,
    ReceiverProgram,
    SenderProgram,
)
from weight_sync.quantize.wanted import QuantSpec
from weight_sync.recording import Recording
from weight_sync.wire.address import Address


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the class name is the tag on the wire."""


# --- to a trainer rank -------------------------------------------------------------------------


class GetManifest(Message, frozen=True):
    """Asks what the rank serves.

    Attributes:
        plain: Asks what the trainer itself holds instead, before anything is quantized.
    """

    plain: bool = False


class Quantize(Message, frozen=True):
    """Says what engines want quantized; the rank answers with the manifest it serves from now on.

    Attributes:
        wanted: What all engines want, on every rank alike; empty for nothing.
        epoch: Epoch that is being built.
    """

    wanted: tuple[QuantSpec, ...]
    epoch: int


class SetProgram(Message, frozen=True):
    """Hands over the rank's part of a plan."""

    program: SenderProgram


class AwaitVersion(Message, frozen=True):
    """Waits until the rank says its weights are at ``version`` and will not change.

    Digests that will be asked for are made from then on, while engines pause and bytes travel.
    """

    version: int
    epoch: int
    seconds: float
    verify: bool


class GetExports(Message, frozen=True):
    """Asks how a peer on this host reaches the rank's regions."""

    epoch: int
    plan_digest: str


class GetDigests(Message, frozen=True):
    """Asks for the digests of what this rank contributes to one class of workers."""

    epoch: int
    plan_digest: str
    version: int
    class_id: int


class GetReplicaDigests(Message, frozen=True):
    """Asks for one digest per owned region, to compare replicas."""

    version: int


class StageBucket(Message, frozen=True):
    """Asks the rank to pack one bucket of its stream to a worker into a slot of its ring."""

    epoch: int
    plan_digest: str
    version: int
    worker: int
    bucket: int


class Release(Message, frozen=True):
    """Ends a refit for the rank: it may change its weights again."""

    version: int
    epoch: int
    error: str


# --- to trainer ranks and to the control servers of engine workers ------------------------------


class GroupSpec(msgspec.Struct, frozen=True, array_like=True):
    """One communication group: some trainer ranks, then all engine workers.

    Attributes:
        rendezvous: Where its ranks meet.
        trainers: Trainer ranks in it, ascending; they have the first ranks of the group.
        names: All participants by rank of the group, for messages.
    """

    rendezvous: Rendezvous
    trainers: tuple[int, ...]
    names: tuple[str, ...]


class JoinGroups(Message, frozen=True):
    """Builds the groups of an epoch; everybody in them gets this at once.

    Attributes:
        epoch: Membership epoch.
        plan_digest: Must equal the participant's own.
        groups: All groups, in the order in which everybody launches.
        rounds: End of each round, in steps.
        bucket_bytes: Bucket size of one stream.
        seconds: How long connecting may take.
        sends: For a trainer rank that takes part in broadcasts.
        keeps: For an engine worker that takes part in broadcasts.
    """

    epoch: int
    plan_digest: str
    groups: tuple[GroupSpec, ...]
    rounds: tuple[int, ...]
    bucket_bytes: int
    seconds: float
    sends: BroadcastSends | None = None
    keeps: BroadcastKeeps | None = None


class Joined(Message, frozen=True):
    """The groups are built.

    Attributes:
        cuts: Digest of the buckets per peer, to be compared with the peer's own.
    """

    cuts: dict[str, str]


class SendRounds(Message, frozen=True):
    """Lets a trainer rank send rounds ``first`` to ``last - 1`` of a version."""

    epoch: int
    plan_digest: str
    version: int
    first: int
    last: int
    seconds: float


class StageVersion(Message, frozen=True):
    """Lets a worker receive the first round of a version into spare memory."""

    epoch: int
    plan_digest: str
    version: int
    verify: bool
    seconds: float


class VersionStaged(Message, frozen=True):
    """The first round lies in spare memory; all of it was verified if it is the only one.

    Attributes:
        seconds: Seconds per stage.
    """

    seconds: dict[str, float]


class AbortGroups(Message, frozen=True):
    """Ends whatever the participant is doing in the groups of an epoch."""

    epoch: int
    reason: str


# --- from a trainer rank -----------------------------------------------------------------------


class GotManifest(Message, frozen=True):
    """What the rank holds.

    Attributes:
        manifest: Names, layouts and regions.
        epoch: Epoch of the plan the rank holds, -1 if none.
    """

    manifest: Manifest
    epoch: int


class Done(Message, frozen=True):
    """Nothing to report."""


class Published(Message, frozen=True):
    """The rank's weights are at ``version``."""

    version: int
    generation: int


class StorageHandle(msgspec.Struct, frozen=True, array_like=True):
    """How a peer maps one storage.

    Attributes:
        kind: ``"shm"`` (a descriptor of process ``pid``) or ``"cuda"`` (an IPC handle).
        nbytes: Length of the mapping from ``offset``.
        pid: Exporting process.
        descriptor: File descriptor in that process, for shm.
        inode: Inode of the file behind it: a descriptor number alone may be used again.
        handle: CUDA IPC handle of the allocation that holds the storage.
        offset: Bytes from the start of that allocation to the storage.
        device: UUID of the GPU the memory is on.
    """

    kind: str
    nbytes: int
    pid: int = 0
    descriptor: int = -1
    inode: int = 0
    handle: bytes = b""
    offset: int = 0
    device: str = ""


class Exports(Message, frozen=True):
    """How a peer reaches regions.

    Attributes:
        generation: Grows when a storage moved; workers then map again.
        storages: Mappable storages.
        storage: int32 ``[regions]``, index into ``storages``; -1 where the region must be staged.
        offset: int64 ``[regions]``, element offset in the storage.
        stride: int64 ``[regions, R]`` element strides, left-padded with 0.
        dtypes: Local dtype per region, before any declared cast.
    """

    generation: int
    storages: tuple[StorageHandle, ...]
    storage: PackedArray
    offset: PackedArray
    stride: PackedArray
    dtypes: tuple[str, ...]


class Staged(Message, frozen=True):
    """A bucket lies in a ring slot.

    Attributes:
        slot: The slot's storage.
        buckets: Number of buckets in the stream.
    """

    slot: StorageHandle
    buckets: int


class Digests(Message, frozen=True):
    """uint64 sums, as :class:`PackedArray`."""

    values: PackedArray


# --- to an engine worker -----------------------------------------------------------------------


class GetWanted(Message, frozen=True):
    """Asks which of the offered tensors the engine holds quantized."""

    offers: tuple[TensorSpec, ...]


class Record(Message, frozen=True):
    """Asks what the worker's loaders read of the offered tensors."""

    offers: tuple[TensorSpec, ...]
    not_trained: tuple[str, ...]


class TrainerEndpointInfo(msgspec.Struct, frozen=True, array_like=True):
    """Where a trainer rank listens and what it is."""

    rank: int
    address: Address
    host: str
    device: str


class Attach(Message, frozen=True):
    """Hands over every worker's part of a plan and connects the workers to the trainer.

    One request reaches all workers of a shard; each takes the program at its own rank.
    """

    programs: tuple[ReceiverProgram, ...]
    trainers: tuple[TrainerEndpointInfo, ...]
    transport: str
    seconds: float


class Commit(Message, frozen=True):
    """Installs a version into live weights; the engine is paused.

    Attributes:
        epoch: Membership epoch.
        plan_digest: Digest of the plan.
        version: Version to install.
        verify: Whether digests are compared.
        seconds: Deadline inside the worker.
        generations: Export generation of every trainer rank, in rank order.
    """

    epoch: int
    plan_digest: str
    version: int
    verify: bool
    seconds: float
    generations: tuple[int, ...]


class Detach(Message, frozen=True):
    """Drops connections, mappings and groups of an epoch; those of a later one stay."""

    epoch: int
    reason: str


class Status(Message, frozen=True):
    """Asks for the worker's state."""


# --- from an engine worker ---------------------------------------------------------------------


class Wanted(Message, frozen=True):
    """What the worker wants quantized.

    Attributes:
        worker: Rank in the shard.
        specs: One per checkpoint name; empty where it takes tensors as the trainer holds them.
    """

    worker: int
    specs: tuple[QuantSpec, ...]


class Recorded(Message, frozen=True):
    """What the worker's loaders read and write, and where the worker runs."""

    worker: int
    recording: Recording
    host: str
    device: str
    pid: int


class Attached(Message, frozen=True):
    """The worker is connected.

    Attributes:
        worker: Rank in the shard.
        extra_bytes: Device memory held for the transport.
        spare_bytes: Memory that may be used for staging.
        control: Where the worker answers while its engine runs or is busy.
    """

    worker: int
    extra_bytes: int
    spare_bytes: int
    control: Address


class Committed(Message, frozen=True):
    """One version is installed.

    Attributes:
        worker: Rank in the shard.
        version: The version.
        seconds: Seconds per stage.
        nbytes: Bytes written into loading-layout tensors.
        verified: Whether every digest was compared and equal.
        modes: Units per install mode.
    """

    worker: int
    version: int
    seconds: dict[str, float]
    nbytes: int
    verified: bool
    modes: dict[str, int]


class WorkerState(Message, frozen=True):
    """What a worker knows of itself.

    Attributes:
        version: Last committed version; -1 before the first and while weights are discarded.
        torn: True from the first byte of a refit until its commit.
        epoch: Newest epoch the worker was attached in, -1 before the first.
        asleep: Kinds of memory that are freed, e.g. ``("kv_cache", "weights")``.
        discarded: Whether weights lost their values since the last full refit.
    """

    version: int
    torn: bool
    epoch: int
    asleep: tuple[str, ...] = ()
    discarded: bool = False


class Failure(Message, frozen=True):
    """A request that failed, with what is needed to raise it again elsewhere."""

    kind: str
    text: str
    stage: str = ""
    version: int | None = None
    epoch: int | None = None
    ranks: tuple[str, ...] = ()
    unconsumed: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    disagreeing: tuple[str, ...] = ()
    remedy: str = ""


TrainerRequest = (
    GetManifest
    | Quantize
    | SetProgram
    | AwaitVersion
    | GetExports
    | GetDigests
    | GetReplicaDigests
    | StageBucket
    | Release
    | JoinGroups
    | SendRounds
    | AbortGroups
    | Detach
)
TrainerReply = GotManifest | Done | Published | Exports | Staged | Digests | Joined | Failure
WorkerRequest = GetWanted | Record | Attach | Commit | Detach | Status
WorkerReply = Wanted | Recorded | Attached | Committed | Done | WorkerState | Failure
ControlRequest = JoinGroups | StageVersion | AbortGroups | Status
ControlReply = Joined | VersionStaged | Done | WorkerState | Failure

encode = msgspec.msgpack.Encoder().encode
decode_trainer_request = msgspec.msgpack.Decoder(TrainerRequest).decode
decode_trainer_reply = msgspec.msgpack.Decoder(TrainerReply).decode
decode_worker_request = msgspec.msgpack.Decoder(WorkerRequest).decode
decode_worker_reply = msgspec.msgpack.Decoder(WorkerReply).decode
decode_control_request = msgspec.msgpack.Decoder(ControlRequest).decode
decode_control_reply = msgspec.msgpack.Decoder(ControlReply).decode
