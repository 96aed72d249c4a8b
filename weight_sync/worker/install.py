"""Writes deliveries into a model: direct pieces at once, other units one module at a time."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.dtypes import itemsize
from weight_sync.errors import LayoutError, VerifyError, shorten
from weight_sync.kernels.base import CompiledCopy, CompiledDigest, RawBuffer
from weight_sync.kernels.compiler import compile_copy, compile_digest
from weight_sync.kernels.pieces import PieceTable
from weight_sync.layout import contiguous_strides
from weight_sync.manifest import widen
from weight_sync.program import ReceiverProgram
from weight_sync.recording import Recording
from weight_sync.transports.base import Delivery
from weight_sync.worker.model import EngineModel, UnitInstall
from weight_sync.worker.record import RecordedFill
from weight_sync.worker.recorded import WHOLE, WorkerRecording

I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]


def storage_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as a 1-D uint8 tensor."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


@dataclass(frozen=True)
class _Pieces:
    """The worker's pieces with their destination resolved against its recording."""

    unit: I64
    parameter: I64
    size: I64
    dst_offset: I64
    dst_stride: I64
    index_offset: I64
    index_stride: I64
    slot: NDArray[np.int32]
    dst_dtype: tuple[str, ...]
    nbytes: I64


def resolve(recording: Recording, program: ReceiverProgram) -> _Pieces:
    """Places every piece of a program in the loading layout of its parameter.

    Raises:
        LayoutError: If the program does not belong to the recording.
    """
    width = program.offset.unpack().shape[1]
    index = program.slice.unpack().astype(np.int64)
    slices = len(recording.source.unpack())
    if len(index) and (index.min() < 0 or index.max() >= slices):
        raise LayoutError("the program names slices this worker did not record; plan again")
    offset = program.offset.unpack().astype(np.int64)
    size = program.size.unpack().astype(np.int64)
    base = widen(recording.offset.unpack().astype(np.int64), width, 0)[index]
    extent = widen(recording.size.unpack().astype(np.int64), width, 1)[index]
    if ((offset < base) | (offset + size > base + extent)).any():
        raise LayoutError("a piece of the program lies outside its recorded slice; plan again")
    stride = widen(recording.dst_stride.unpack().astype(np.int64), width, 0)[index]
    parameter = recording.parameter.unpack().astype(np.int64)[index]
    source = recording.source.unpack().astype(np.int64)[index]
    units = np.array([p.unit for p in recording.parameters], np.int64)
    shapes = np.zeros((len(recording.sources), width), np.int64)
    for i, spec in enumerate(recording.sources):
        if spec.shape:
            shapes[i, width - len(spec.shape) :] = contiguous_strides(spec.shape)
    sizes = np.array([itemsize(p.dtype) for p in recording.parameters], np.int64)
    return _Pieces(
        unit=units[parameter],
        parameter=parameter,
        size=size,
        dst_offset=recording.dst_offset.unpack()[index] + ((offset - base) * stride).sum(axis=1),
        dst_stride=stride,
        index_offset=(offset * shapes[source]).sum(axis=1),
        index_stride=shapes[source],
        slot=recording.slot.unpack()[index].astype(np.int32),
        dst_dtype=tuple(recording.parameters[int(p)].dtype for p in parameter),
        nbytes=size.prod(axis=1) * sizes[parameter],
    )


class Stopwatch:
    """Adds up seconds per stage."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._clock = clock

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a block."""
        start = self._clock()
        try:
            yield
        finally:
            self.seconds[name] += self._clock() - start


@dataclass(eq=False)
class _Part:
    """What one delivery brings, compiled for where it is written.

    Buffers of units that are processed hold none of their memory: it is new in every refit, though
    mostly where it was.
    """

    buffers: Sequence[torch.Tensor | RawBuffer]
    copy: CompiledCopy
    tables: Sequence[PieceTable]
    _digest: CompiledDigest | None = None

    def digest(self, slots: int) -> U64:
        """Digests of what was written, per slot."""
        if self._digest is None:
            self._digest = compile_digest(self.tables, self.buffers, "dst", slots)
        return self._digest.run()


@dataclass
class _OpenUnit:
    install: UnitInstall
    destinations: dict[int, torch.Tensor]
    left: int
    parts: list[_Part]


class Installer:
    """Installs versions for one worker and one program.

    Args:
        model: The engine's model.
        recorded: This worker's recording.
        program: Its part of the plan.
    """

    def __init__(
        self, model: EngineModel, recorded: WorkerRecording, program: ReceiverProgram
    ) -> None:
        self._model = model
        self._recording = recorded.recording
        self._fills = recorded.fills
        self._pieces = resolve(recorded.recording, program)
        direct = np.array([u.mode == "direct" for u in self._recording.units], bool)
        self._direct = direct[self._pieces.unit]
        self._slots = len(self._recording.slot_source.unpack())
        self._modes = dict(Counter(unit.mode for unit in self._recording.units))
        # Kept from refit to refit, and the digests of what is only staged.
        self._parts: dict[object, _Part] = {}
        self._digests: dict[object, CompiledDigest] = {}
        self._used: set[object] = set()
        self._addresses = [
            (live, name, tensor.data_ptr(), unit.name)
            for unit in self._recording.units
            for live in [model.live(unit.name)]
            for name, tensor in live.items()
        ]
        self._open: dict[int, _OpenUnit] = {}
        self.bytes_total = int(self._pieces.nbytes.sum())

    def forget(self) -> None:
        """Drops everything that refers to the memory of deliveries."""
        self._parts.clear()
        self._digests.clear()

    def moved(self) -> list[str]:
        """Live tensors whose address is not the one they had when the program came."""
        moved = []
        # Asked of every tensor in every refit. Parameter classes of engines dispatch every call in
        # Python, which would take most of the time.
        with torch._C.DisableTorchFunctionSubclass():
            for live, name, address, unit in self._addresses:
                tensor = live.get(name)
                if tensor is None or tensor.data_ptr() != address:
                    moved.append(f"{unit}.{name}")
        return sorted(moved)

    @property
    def modes(self) -> dict[str, int]:
        """Units per mode."""
        return self._modes

    def nbytes(self, delivery: Delivery) -> int:
        """Bytes that a delivery writes."""
        return int(self._pieces.nbytes[delivery.rows].sum())

    def install(
        self,
        deliveries: Iterator[Delivery],
        expected: Callable[[], U64 | None],
        watch: Stopwatch,
        version: int,
        epoch: int,
        stage: str = "transfer",
    ) -> None:
        """Installs one version from its deliveries.

        Args:
            deliveries: Everything the program needs, each piece once.
            expected: Called when digests are needed; None skips verification.
            watch: Gets the seconds of transfer, process and verify.
            version: For errors.
            epoch: For errors.
            stage: What the watch calls the copies.

        Raises:
            VerifyError: If digests differ; live processed units that were not finished are intact.
        """
        seen = 0
        self._used = set()
        direct: list[_Part] = []
        finished: list[str] = []
        try:
            while True:
                with watch.stage("transfer"):
                    delivery = next(deliveries, None)
                if delivery is None:
                    break
                seen += len(delivery.rows)
                mine = self._direct[delivery.rows]
                rows = np.flatnonzero(mine)
                if len(rows):
                    with watch.stage(stage):
                        direct.append(self._copy_direct(delivery, rows))
                units = self._pieces.unit[delivery.rows]
                for unit in _in_order(units[~mine]) if len(rows) < len(mine) else ():
                    with watch.stage(stage):
                        self._copy_unit(int(unit), delivery, np.flatnonzero(units == unit))
                    if self._open[int(unit)].left == 0:
                        self._finish(int(unit), expected, watch, version, epoch)
                        finished.append(self._recording.units[int(unit)].name)
                with watch.stage(stage):
                    self._synchronize()
                    delivery.release()
            if seen != len(self._pieces.unit):
                raise LayoutError(
                    f"the transport delivered {seen} of {len(self._pieces.unit)} pieces"
                )
            with watch.stage("verify"):
                self._verify(direct, expected(), version, epoch)
            self._forget_unused()
            with watch.stage("process"):
                self._model.refresh_derived(
                    [*finished, *(u.name for u in self._recording.units if u.mode == "direct")]
                )
        finally:
            for unit in list(self._open):
                self._open.pop(unit).install.abort()

    def check(self, delivery: Delivery, want: U64, version: int, epoch: int) -> None:
        """Compares what a delivery holds with the trainer's digests; nothing is written.

        Raises:
            VerifyError: Naming the tensors that differ.
        """
        if delivery.key not in self._digests:
            # Only the source side of these tables is looked at.
            nowhere: dict[int, int] = defaultdict(int)
            tables = self._table(delivery, np.arange(len(delivery.rows)), nowhere, nowhere)
            buffers = [b for b in delivery.buffers if isinstance(b, torch.Tensor)]
            self._digests[delivery.key] = compile_digest(tables, buffers, "src", len(want))
        have = self._digests[delivery.key].run()
        mine = np.unique(self._pieces.slot[delivery.rows])
        self._compare(have[mine], want[mine], mine, version, epoch)

    def _forget_unused(self) -> None:
        """Forgets copies from places that weights have left."""
        for key in set(self._parts) - self._used:
            del self._parts[key]

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.current_stream(self._model.device).synchronize()

    def _table(
        self, delivery: Delivery, rows: I64, buffer_of: Mapping[int, int], shift: Mapping[int, int]
    ) -> list[PieceTable]:
        """Piece tables of some rows of a delivery, one per pair of dtypes."""
        pieces = self._pieces
        chosen = delivery.rows[rows]
        parameter = pieces.parameter[chosen].tolist()
        groups: dict[tuple[str, str], list[int]] = defaultdict(list)
        for i, row in enumerate(chosen.tolist()):
            groups[delivery.dtypes[int(rows[i])], pieces.dst_dtype[row]].append(i)
        destination = np.array([buffer_of[p] for p in parameter], np.int32)
        moved = np.array([shift[p] for p in parameter], np.int64)
        tables = []
        for (src, dst), members in groups.items():
            at = np.array(members, np.int64)
            row, mine = chosen[at], rows[at]
            tables.append(
                PieceTable(
                    src_dtype=src,
                    dst_dtype=dst,
                    shape=pieces.size[row],
                    src_buffer=delivery.buffer[mine],
                    src_offset=delivery.offset[mine],
                    src_stride=delivery.stride[mine],
                    dst_buffer=destination[at],
                    dst_offset=pieces.dst_offset[row] + moved[at],
                    dst_stride=pieces.dst_stride[row],
                    index_offset=pieces.index_offset[row],
                    index_stride=pieces.index_stride[row],
                    slot=pieces.slot[row],
                )
            )
        return tables

    def _copy_direct(self, delivery: Delivery, rows: I64) -> _Part:
        key = (delivery.key, len(rows))
        if key not in self._parts:
            live: dict[int, torch.Tensor] = {}
            for parameter in np.unique(self._pieces.parameter[delivery.rows[rows]]).tolist():
                spec = self._recording.parameters[parameter]
                unit = self._recording.units[spec.unit].name
                attribute = spec.name[len(unit) + 1 :] if unit else spec.name
                live[parameter] = self._model.live(unit)[attribute].detach()
            buffers = [storage_bytes(tensor) for tensor in live.values()]
            self._parts[key] = self._compile(delivery, rows, live, buffers)
        return self._run(key)

    def _copy_unit(self, unit: int, delivery: Delivery, rows: I64) -> None:
        if unit not in self._open:
            self._open[unit] = self._begin(unit)
        work = self._open[unit]
        mine = np.unique(self._pieces.parameter[delivery.rows[rows]]).tolist()
        written = {parameter: work.destinations[parameter] for parameter in mine}
        storages = [storage_bytes(tensor) for tensor in written.values()]
        buffers = [RawBuffer(s.data_ptr(), s.numel(), _ordinal(s)) for s in storages]
        key = (unit, delivery.key, len(rows))
        known = self._parts.get(key)
        if known is None or known.buffers != buffers:
            # Of all memory that was delivered, units need little.
            chosen = delivery.take(rows)
            self._parts[key] = self._compile(chosen, np.arange(len(rows)), written, buffers)
        work.parts.append(self._run(key))
        work.left -= len(rows)

    def _compile(
        self,
        delivery: Delivery,
        rows: I64,
        written: Mapping[int, torch.Tensor],
        buffers: Sequence[torch.Tensor | RawBuffer],
    ) -> _Part:
        """A copy of some rows of a delivery into tensors, by parameter, and their storages."""
        buffer_of = {parameter: i for i, parameter in enumerate(written)}
        shift = {parameter: int(t.storage_offset()) for parameter, t in written.items()}
        tables = self._table(delivery, rows, buffer_of, shift)
        return _Part(buffers, compile_copy(tables, delivery.buffers, buffers), tables)

    def _run(self, key: object) -> _Part:
        part = self._parts[key]
        part.copy.run()
        self._used.add(key)
        return part

    def _begin(self, unit: int) -> _OpenUnit:
        spec = self._recording.units[unit]
        install = self._model.begin(spec.name)
        tensors = install.tensors
        destinations: dict[int, torch.Tensor] = {}
        for number, parameter in enumerate(self._recording.parameters):
            if parameter.unit != unit:
                continue
            attribute = parameter.name[len(spec.name) + 1 :] if spec.name else parameter.name
            if attribute.startswith(WHOLE):
                destinations[number] = torch.empty(
                    parameter.shape,
                    dtype=getattr(torch, parameter.dtype),
                    device=self._model.device,
                )
            else:
                destinations[number] = tensors[attribute].detach()
        for fill in self._fills.get(spec.name, ()):
            _fill(tensors[fill.parameter.attribute], fill)
        left = int((self._pieces.unit == unit).sum())
        return _OpenUnit(install, destinations, left, [])

    def _finish(
        self,
        unit: int,
        expected: Callable[[], U64 | None],
        watch: Stopwatch,
        version: int,
        epoch: int,
    ) -> None:
        work = self._open[unit]
        spec = self._recording.units[unit]
        with watch.stage("verify"):
            self._verify(work.parts, expected(), version, epoch)
        with watch.stage("process"):
            if spec.mode == "loader":
                names = {
                    number: self._recording.sources[int(s)].name
                    for number, s in zip(
                        self._recording.parameter.unpack(),
                        self._recording.source.unpack(),
                        strict=True,
                    )
                }
                work.install.load([(names[n], t) for n, t in work.destinations.items()])
            work.install.finish()
        del self._open[unit]

    def _verify(self, parts: Sequence[_Part], want: U64 | None, version: int, epoch: int) -> None:
        """Compares what parts wrote together with the trainer's digests; None skips that."""
        if want is None or not parts:
            return
        none = np.zeros(self._slots, np.uint64)
        have = sum((part.digest(self._slots) for part in parts), none)
        mine = np.unique(np.concatenate([t.slot for part in parts for t in part.tables]))
        self._compare(have[mine], want[mine], mine, version, epoch)

    def _compare(
        self, have: U64, want: U64, slot: NDArray[np.int32], version: int, epoch: int
    ) -> None:
        bad = slot[have != want]
        if len(bad):
            owner = self._recording.slot_source.unpack()
            names = {self._recording.sources[int(owner[s])].name for s in bad}
            raise VerifyError(
                f"digests of {len(names)} tensors differ from the trainer's: {shorten(names)}",
                stage="verify",
                version=version,
                epoch=epoch,
            )


def _ordinal(tensor: torch.Tensor) -> int | None:
    return tensor.get_device() if tensor.is_cuda else None


def _in_order(values: I64) -> I64:
    """Distinct values in order of first appearance."""
    distinct, first = np.unique(values, return_index=True)
    return distinct[np.argsort(first)]


def _fill(tensor: torch.Tensor, fill: RecordedFill) -> None:
    view = fill.view
    tensor.data.as_strided(view.size, view.stride, view.offset).fill_(fill.value)
