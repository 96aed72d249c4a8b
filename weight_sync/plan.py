"""The plan: who sends which bytes to whom, computed once per epoch and shared by one digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from weight_sync.arrays import pack
from weight_sync.assign import assign
from weight_sync.dtypes import ITEMSIZE
from weight_sync.errors import CoverageError, LayoutError, shorten
from weight_sync.manifest import Catalogue, Manifest, build_catalogue
from weight_sync.membership import Membership
from weight_sync.pieces import Pieces, intersect
from weight_sync.program import HashTask, ReceiverProgram, SenderProgram, SendTask
from weight_sync.recording import Recording
from weight_sync.regions import Regions, unite

I64 = NDArray[np.int64]
DEFAULT_BUCKET_BYTES = 256 << 20


@dataclass(frozen=True)
class Plan:
    """Everything that is decided before the first byte of an epoch.

    Attributes:
        membership: Participants.
        catalogue: All trainer tensors.
        regions: Distinct trainer regions.
        recordings: One per class of workers.
        pieces: One per class.
        worker_class: Class of each worker.
        senders: Per worker, int32 ``[n]`` trainer rank of each piece of its class.
        bucket_bytes: Bucket size of packed transports.
        digest: Hash over all of the above.
    """

    membership: Membership
    catalogue: Catalogue
    regions: Regions
    recordings: tuple[Recording, ...]
    pieces: tuple[Pieces, ...]
    worker_class: tuple[int, ...]
    senders: tuple[NDArray[np.int32], ...]
    bucket_bytes: int
    digest: str

    @property
    def bytes_sent(self) -> int:
        """Bytes that leave senders, counted once per receiver."""
        return sum(int(self.pieces[c].nbytes.sum()) for c in self.worker_class)

    @property
    def tensors(self) -> int:
        """Checkpoint tensors that at least one worker reads."""
        return len({s.name for r in self.recordings for s in r.sources})

    def sender_bytes(self) -> I64:
        """int64 ``[trainer ranks]`` bytes each rank sends."""
        out = np.zeros(self.membership.trainer_world_size, np.int64)
        for worker, c in enumerate(self.worker_class):
            out += np.bincount(
                self.senders[worker], weights=self.pieces[c].nbytes, minlength=len(out)
            ).astype(np.int64)
        return out

    @cached_property
    def units(self) -> NDArray[np.int32]:
        """int32 ``[tensors]``, as :func:`unit_numbers`."""
        return unit_numbers(self.catalogue)

    @cached_property
    def _region_numbers(self) -> tuple[NDArray[np.int32], ...]:
        """Per worker, the number of each piece's region in its sender's own manifest."""
        span = self.membership.trainer_world_size + 1
        key = np.repeat(np.arange(len(self.regions.tensor)), np.diff(self.regions.owner_first))
        key = key * span + self.regions.owner_rank
        out = []
        for worker, c in enumerate(self.worker_class):
            at = np.searchsorted(key, self.pieces[c].region * span + self.senders[worker])
            out.append(self.regions.owner_region[at].astype(np.int32))
        return tuple(out)

    @cached_property
    def orders(self) -> tuple[I64, ...]:
        """Per class, pieces in the order packed transports send them: units together, by slice."""
        out = []
        for pieces in self.pieces:
            unit = self.units[pieces.tensor].astype(np.int64)
            lead = np.arange(len(pieces), dtype=np.int64)
            if (unit >= 0).any():
                first = np.full(int(unit.max()) + 1, len(pieces), np.int64)
                np.minimum.at(first, unit[unit >= 0], lead[unit >= 0])
                lead = np.where(unit >= 0, first[np.maximum(unit, 0)], lead)
            out.append(np.argsort(lead, kind="stable"))
        return tuple(out)

    @cached_property
    def _by_sender(self) -> tuple[tuple[I64, I64], ...]:
        """Per worker, pieces sorted by sender, and where each sender's begin: ``[ranks + 1]``."""
        ranks = np.arange(self.membership.trainer_world_size + 1)
        out = []
        for worker, c in enumerate(self.worker_class):
            senders = self.senders[worker][self.orders[c]]
            sort = np.argsort(senders, kind="stable")
            out.append((self.orders[c][sort], np.searchsorted(senders[sort], ranks)))
        return tuple(out)

    @cached_property
    def _wire_dtypes(self) -> tuple[tuple[str, ...], ...]:
        """Per class, the dtype of each recording source as the trainer sends it."""
        dtypes = {t.name: t.dtype for t in self.catalogue.tensors}
        return tuple(tuple(dtypes[s.name] for s in r.sources) for r in self.recordings)

    def sent(self, worker: int, rank: int) -> I64:
        """Pieces that ``rank`` sends to ``worker``, in the order of the worker's program."""
        rows, first = self._by_sender[worker]
        return rows[first[rank] : first[rank + 1]]

    def receiver_program(self, worker: int) -> ReceiverProgram:
        """The part of one worker."""
        c = self.worker_class[worker]
        pieces, order = self.pieces[c], self.orders[c]
        return ReceiverProgram(
            epoch=self.membership.epoch,
            plan_digest=self.digest,
            worker=worker,
            class_id=c,
            slice=pack(pieces.slice[order].astype(np.int32)),
            sender=pack(self.senders[worker][order]),
            region=pack(self._region_numbers[worker][order]),
            offset=pack(pieces.offset[order]),
            size=pack(pieces.size[order]),
            unit=pack(self.units[pieces.tensor[order]]),
            wire_dtype=self._wire_dtypes[c],
            bucket_bytes=self.bucket_bytes,
        )

    def sender_program(self, rank: int) -> SenderProgram:
        """The part of one trainer rank."""
        hashes = []
        for c, pieces in enumerate(self.pieces):
            # Replicas hold equal bytes, so the first worker's senders answer for the class.
            worker = self.worker_class.index(c)
            mine = self.sent(worker, rank)
            if len(mine):
                hashes.append(
                    HashTask(
                        class_id=c,
                        slots=self.recordings[c].slot_source.shape[0],
                        slot=pack(pieces.slot[mine].astype(np.int32)),
                        region=pack(self._region_numbers[worker][mine]),
                        offset=pack(pieces.offset[mine]),
                        size=pack(pieces.size[mine]),
                    )
                )
        sends = []
        for worker, c in enumerate(self.worker_class):
            mine = self.sent(worker, rank)
            if len(mine):
                pieces = self.pieces[c]
                sends.append(
                    SendTask(
                        worker=worker,
                        region=pack(self._region_numbers[worker][mine]),
                        offset=pack(pieces.offset[mine]),
                        size=pack(pieces.size[mine]),
                        unit=pack(self.units[pieces.tensor[mine]]),
                    )
                )
        return SenderProgram(
            epoch=self.membership.epoch,
            plan_digest=self.digest,
            rank=rank,
            hashes=tuple(hashes),
            sends=tuple(sends),
            bucket_bytes=self.bucket_bytes,
        )


def build_plan(
    membership: Membership,
    manifests: Sequence[Manifest],
    recordings: Sequence[Recording],
    *,
    cost: NDArray[np.int8] | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    not_trained: Sequence[str] = (),
) -> Plan:
    """Computes the plan of one epoch.

    Args:
        membership: Participants.
        manifests: One per trainer rank.
        recordings: One per worker, in dense worker order; equal ones are planned once.
        cost: int8 ``[trainer ranks, workers]``, how far a sender is from a receiver; equal if None.
        bucket_bytes: Bucket size of packed transports.
        not_trained: Names or ``prefix*`` of trainer tensors the engine may ignore and engine
            parameters that may keep their values.

    Raises:
        LayoutError: If ranks disagree or regions do not tile their tensors.
        CoverageError: If a trainer tensor reaches no worker or dtypes disagree.
    """
    if len(manifests) != membership.trainer_world_size or len(recordings) != membership.workers:
        raise LayoutError(
            f"epoch {membership.epoch} has {membership.trainer_world_size} trainer ranks and "
            f"{membership.workers} workers, but {len(manifests)} manifests and "
            f"{len(recordings)} recordings came"
        )
    catalogue = build_catalogue(manifests)
    regions = unite(catalogue, manifests)
    distinct, classes = _classes(recordings)
    check_coverage(catalogue, distinct, not_trained)
    pieces = [intersect(catalogue, regions, r) for r in distinct]
    if cost is None:
        cost = np.zeros((membership.trainer_world_size, membership.workers), np.int8)
    units = unit_numbers(catalogue)
    senders = assign(
        regions,
        [p.region for p in pieces],
        [p.nbytes for p in pieces],
        [units[p.tensor] for p in pieces],
        classes,
        cost,
    )
    return Plan(
        membership=membership,
        catalogue=catalogue,
        regions=regions,
        recordings=tuple(distinct),
        pieces=tuple(pieces),
        worker_class=tuple(classes),
        senders=tuple(senders),
        bucket_bytes=bucket_bytes,
        digest=_digest(membership, catalogue, regions, distinct, classes, senders, bucket_bytes),
    )


def _classes(recordings: Sequence[Recording]) -> tuple[list[Recording], list[int]]:
    """The distinct recordings, and which of them each worker has."""
    distinct: list[Recording] = []
    alike: dict[tuple[bytes, bytes], list[int]] = {}
    classes: list[int] = []
    for recording in recordings:
        # Workers differ in what they cut; only those that cut alike are compared in full.
        known = alike.setdefault((recording.offset.data, recording.size.data), [])
        number = next((n for n in known if distinct[n] == recording), len(distinct))
        if number == len(distinct):
            known.append(number)
            distinct.append(recording)
        classes.append(number)
    return distinct, classes


def unit_numbers(catalogue: Catalogue) -> NDArray[np.int32]:
    """int32 ``[tensors]``, equal for tensors that travel together, -1 for those that do not."""
    numbers: dict[str, int] = {}
    return np.array(
        [numbers.setdefault(t.unit, len(numbers)) if t.unit else -1 for t in catalogue.tensors],
        np.int32,
    )


def matches(name: str, patterns: Sequence[str]) -> bool:
    """True if ``name`` equals a pattern or starts with one that ends in ``*``."""
    return any(name.startswith(p[:-1]) if p.endswith("*") else name == p for p in patterns)


def check_coverage(
    catalogue: Catalogue, recordings: Sequence[Recording], not_trained: Sequence[str] = ()
) -> None:
    """Refuses names nobody reads and dtypes that would be converted on the way.

    Raises:
        CoverageError: Listing all of them at once.
        LayoutError: If a recording was made from names of another epoch.
    """
    read = {s.name for r in recordings for s in r.sources}
    aliases = {t.name: t.alias_of for t in catalogue.tensors if t.alias_of}
    groups = {t.name: aliases.get(t.name, t.name) for t in catalogue.tensors}
    if gone := read - groups.keys():
        raise LayoutError(
            f"engine workers recorded {len(gone)} tensors that no trainer rank offers: "
            f"{shorten(gone)}. Record again with the names of this epoch's manifests"
        )
    used_groups = {groups[name] for name in read}
    unconsumed = [
        t.name
        for t in catalogue.tensors
        if groups[t.name] not in used_groups and not matches(t.name, not_trained)
    ]
    disagreeing: dict[str, None] = {}
    code = {dtype: number for number, dtype in enumerate(ITEMSIZE)}
    sent_as = {t.name: t.dtype for t in catalogue.tensors}
    for recording in recordings:
        sent = np.array([code[sent_as[s.name]] for s in recording.sources], np.int64)
        stored = np.array([code.get(p.dtype, -1) for p in recording.parameters], np.int64)
        source, parameter = recording.source.unpack(), recording.parameter.unpack()
        for row in np.flatnonzero(sent[source] != stored[parameter]).tolist():
            name = recording.sources[int(source[row])].name
            target = recording.parameters[int(parameter[row])]
            disagreeing[
                f"{name} is sent as {sent_as[name]}, engine stores {target.name} as {target.dtype}"
                " (declare a cast for it on the trainer)"
            ] = None
    if unconsumed or disagreeing:
        raise CoverageError(unconsumed=unconsumed, disagreeing=disagreeing)


def _digest(
    membership: Membership,
    catalogue: Catalogue,
    regions: Regions,
    recordings: Sequence[Recording],
    classes: Sequence[int],
    senders: Sequence[NDArray[np.int32]],
    bucket_bytes: int,
) -> str:
    state = hashlib.blake2b(digest_size=16)
    state.update(
        msgspec.msgpack.encode(
            (
                membership,
                catalogue.tensors,
                [recording.digest() for recording in recordings],
                list(classes),
                bucket_bytes,
            )
        )
    )
    for array in (regions.tensor, regions.offset, regions.size, regions.owner_first):
        state.update(np.ascontiguousarray(array).tobytes())
    state.update(np.ascontiguousarray(regions.owner_rank).tobytes())
    for sender in senders:
        state.update(np.ascontiguousarray(sender).tobytes())
    return state.hexdigest()
