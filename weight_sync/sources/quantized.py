"""Weights as engines want them quantized: values and scales made from a rank's own shard.

Wraps any other source. Each region of a wanted tensor becomes a region of its value and one of its
scale, in one unit; everything else is passed through. Both lie in one block of memory on the
shard's device that keeps its address, so transports export or pack it like any weight, and every
refit only runs the quantize programs again, chunk by chunk in the order in which bytes travel.
Nothing of the trainer's own memory is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.comm.deadline import Deadline
from weight_sync.device_memory import plain_memory
from weight_sync.dtypes import itemsize
from weight_sync.env import deadline_seconds
from weight_sync.errors import LayoutError, QuantizationError, shorten
from weight_sync.faults import FaultHook, no_fault
from weight_sync.layout import Box, full_box
from weight_sync.manifest import Manifest, TensorSpec, build_manifest
from weight_sync.quantize.compiler import compile_fp8_tensor
from weight_sync.quantize.expand import expand, scale_box
from weight_sync.quantize.format import VALUE_DTYPE, Format, scale_dtype
from weight_sync.quantize.wanted import QuantSpec
from weight_sync.quantize.work import CompiledFp8Tensor, Work, refuse_infinities
from weight_sync.sources.base import WeightSource
from weight_sync.sources.quantized_chunks import ChunkedParts
from weight_sync.sources.quantized_scales import SharedScales

# Every value and scale begins at a multiple of this, for the widest accesses of all kernels.
_ALIGN = 256
I64 = NDArray[np.int64]
ReduceMax = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class _Part:
    """One region of a wanted tensor, quantized here.

    Attributes:
        spec: What the engine wants.
        base: Number of the region in the wrapped source.
        box: The region.
        value: Byte offset of the values in the block.
        scale: Byte offset of the scales.
    """

    spec: QuantSpec
    base: int
    box: Box
    value: int
    scale: int


@dataclass(frozen=True)
class _Region:
    """A region of this source's manifest: of the wrapped source, or half of a part."""

    base: int = -1
    part: int = -1
    scale: bool = False


class QuantizedSource:
    """A ``WeightSource`` that quantizes what engines asked for.

    A tensor is quantized from the dtype the trainer holds it in; a declared cast only concerns
    tensors that are not quantized.

    Args:
        source: The rank's weights.
        wanted: What engines want, the same on every rank; names this rank does not know are left
            to others.
        reduce_max: Takes a float32 vector on the shards' device and replaces it by the maximum over
            all trainer ranks, e.g. an ``all_reduce``. Needed where FP8-per-tensor matrices are
            sharded; every rank calls it once per version, in :meth:`ready` and on its thread, and
            nobody bounds how long it takes.
        fault: For fault injection in tests.
    """

    def __init__(
        self,
        source: WeightSource,
        wanted: Sequence[QuantSpec],
        *,
        reduce_max: ReduceMax | None = None,
        fault: FaultHook = no_fault,
    ) -> None:
        self._source = source
        self._wanted = {spec.name: spec for spec in wanted}
        self._reduce = reduce_max
        self._fault = fault
        self._regions: list[_Region] = []
        self._parts: list[_Part] = []
        self._nbytes = 0
        self._memory: torch.Tensor | None = None
        self._part_of = np.zeros(0, np.int64)
        self._order: list[int] = []
        self._chunks: ChunkedParts | None = None
        self._matrices: CompiledFp8Tensor | None = None
        self._scales: SharedScales | None = None
        self._compiled_for: object = None

    @property
    def nbytes(self) -> int:
        """Memory that values and scales of this rank take."""
        return self._nbytes

    @property
    def together(self) -> bool:
        """Whether :meth:`ready` calls ``reduce_max``, so that all ranks have to call it."""
        formats = {spec.format for spec in self._wanted.values()}
        return self._reduce is not None and Format.FP8_TENSOR in formats

    def manifest(self, rank: int, host: str, device: str) -> Manifest:
        """Names, dtypes, global shapes and owned regions, with wanted tensors as pairs.

        Raises:
            QuantizationError: Naming every tensor that cannot be quantized as it is sharded here.
        """
        return self.adopt(self._source.manifest(rank, host, device))

    def adopt(self, base: Manifest) -> Manifest:
        """:meth:`manifest`, from one that the wrapped source made already.

        Raises:
            QuantizationError: Naming every tensor that cannot be quantized as it is sharded here.
        """
        owned: list[list[tuple[int, Box]]] = [[] for _ in base.tensors]
        for number, (owner, (_, box)) in enumerate(
            zip(base.owner.unpack().tolist(), base.regions(), strict=True)
        ):
            owned[owner].append((number, box))
        offers = [
            (tensor, [box for _, box in boxes])
            for tensor, boxes in zip(base.tensors, owned, strict=True)
        ]
        out = build_manifest(
            base.rank,
            base.host,
            base.device,
            expand(offers, self._wanted.values()),
            base.generation,
            base.stage,
        )
        self._place(base.tensors, owned)
        self._refuse_cut_matrices(base.rank)
        self.forget()
        return out

    def _place(
        self, tensors: Sequence[TensorSpec], owned: Sequence[Sequence[tuple[int, Box]]]
    ) -> None:
        """Gives every part its place in the block; tied tensors share one."""
        self._regions, self._parts, self._nbytes = [], [], 0
        known: dict[tuple[str, Box], int] = {}
        for tensor, boxes in zip(tensors, owned, strict=True):
            spec = self._wanted.get(tensor.name)
            if spec is None:
                self._regions += [_Region(base=number) for number, _ in boxes]
                continue
            mine = []
            for number, box in boxes:
                key = (tensor.alias_of or tensor.name, box)
                if key not in known:
                    known[key] = len(self._parts)
                    value = self._reserve(box.elements)
                    scales = scale_box(spec.format, box).elements
                    scale = self._reserve(scales * itemsize(scale_dtype(spec.format)))
                    self._parts.append(_Part(spec, number, box, value, scale))
                mine.append(known[key])
            self._regions += [_Region(part=part) for part in mine]
            self._regions += [_Region(part=part, scale=True) for part in mine]
        self._part_of = np.array([region.part for region in self._regions], np.int64)
        self._order = self._in_chunks(range(len(self._parts)))

    def _reserve(self, nbytes: int) -> int:
        at = self._nbytes
        self._nbytes += -(-nbytes // _ALIGN) * _ALIGN
        return at

    def _refuse_cut_matrices(self, rank: int) -> None:
        if self._reduce is not None:
            return
        have: dict[str, int] = {}
        for part in self._parts:
            if part.spec.format is Format.FP8_TENSOR:
                full = full_box(part.spec.value_shape).size[-2:]
                matrices = prod(part.box.size[:-2])
                missing = matrices * prod(full) - part.box.elements
                have[part.spec.name] = have.get(part.spec.name, 0) + missing
        cut = [name for name, missing in have.items() if missing]
        if cut:
            raise QuantizationError(
                f"trainer rank {rank} holds only parts of matrices that have one FP8 scale: "
                f"{shorten(cut)}. Give the endpoint reduce_max, e.g. an all_reduce with MAX over "
                "all trainer ranks, or let the engine use 128x128 blocks or MXFP8"
            )

    def region(self, number: int) -> torch.Tensor:
        """The local tensor of one region of the last manifest.

        Raises:
            LayoutError: If the quantized memory was given back and not made again.
        """
        region = self._regions[number]
        if region.part < 0:
            return self._source.region(region.base)
        part = self._parts[region.part]
        return self._scale(part) if region.scale else self._value(part).view(_dtype(VALUE_DTYPE))

    def _value(self, part: _Part) -> torch.Tensor:
        return self._bytes(part.value, part.box.elements).view(part.box.size)

    def _scale(self, part: _Part) -> torch.Tensor:
        dtype = scale_dtype(part.spec.format)
        size = scale_box(part.spec.format, part.box).size
        return self._bytes(part.scale, prod(size) * itemsize(dtype)).view(_dtype(dtype)).view(size)

    def _bytes(self, offset: int, nbytes: int) -> torch.Tensor:
        if self._memory is None:
            raise LayoutError(
                "quantized weights were given back; publish() again before engines read them"
            )
        return self._memory[offset : offset + nbytes]

    def prepare(self) -> None:
        """Readies and quantizes the rank's weights: what follows on this thread may read them.

        Raises:
            LayoutError: If a tensor's memory cannot be read by the kernels.
            QuantizationError: If a tensor's dtype does not fit.
            DeadlineError: If quantizing did not end in time.
        """
        self._source.prepare()
        self.ready()
        self.start()
        memory, lane = self._memory, None
        if memory is not None and memory.is_cuda:
            lane = torch.cuda.current_stream(memory.device)
        self.wait(np.arange(len(self._regions)), lane, Deadline(deadline_seconds()))

    def arrange(self, regions: I64) -> None:
        """Says in which order regions will be read, from the next version on.

        Args:
            regions: int64 ``[n]``; those that are missing come last.
        """
        parts = self._part_of[regions].tolist()
        order = self._in_chunks(dict.fromkeys([*parts, *range(len(self._parts))]))
        if order != self._order:
            self._order = order
            self._compiled_for = None

    def _in_chunks(self, parts: Iterable[int]) -> list[int]:
        """Those of parts (-1 for none) that are quantized in chunks."""
        whole = Format.FP8_TENSOR
        return [p for p in parts if p >= 0 and self._parts[p].spec.format is not whole]

    def ready(self) -> None:
        """Quantizes what ranks do together: matrices with one scale, on the current stream.

        What an earlier :meth:`start` began has ended afterwards.

        Raises:
            LayoutError: If a tensor's memory cannot be read by the kernels.
            QuantizationError: If a tensor's dtype does not fit.
            DeadlineError: If an earlier version's quantization did not end in time.
        """
        self.end(deadline_seconds(), early=True)
        if self._memory is None or self._compiled_for != self._source.fingerprint():
            self.compile()
        if self._scales is not None:
            if self._matrices is not None:
                self._matrices.measure()
            self._scales.unite(self._matrices.amax if self._matrices else None, self._reduce)
            if self._matrices is not None:
                self._matrices.cast()

    def start(self) -> None:
        """Begins to quantize the rest, after what the current stream holds; returns at once."""
        if self._chunks is not None:
            self._chunks.start()

    def wait(self, regions: I64, lane: torch.cuda.Stream | None, deadline: Deadline) -> None:
        """Lets what follows read some regions, while others are still being made.

        Args:
            regions: int64 ``[n]``.
            lane: The stream that reads; None if this thread does.
            deadline: When to give up.

        Raises:
            RefitError: If quantizing failed, or weights were published anew or given back.
            DeadlineError: If it did not come so far in time.
        """
        if self._chunks is not None:
            parts = self._part_of[regions]
            self._chunks.wait(parts[parts >= 0], lane, deadline)

    def end(self, seconds: float, *, early: bool = False) -> None:
        """Returns when memory is no longer written, whatever became of it.

        Args:
            seconds: Longest wait.
            early: Whether what was not begun may be left out.

        Raises:
            DeadlineError: If it did not end in time.
        """
        if self._chunks is not None:
            self._chunks.end(Deadline(seconds), early=early)

    def compile(self) -> None:
        """Takes memory and compiles for where the weights lie now.

        Raises:
            LayoutError: If a tensor's memory cannot be read by the kernels.
            QuantizationError: If a tensor's dtype does not fit.
        """
        self._compiled_for = self._source.fingerprint()
        sources = [self._source.region(part.base) for part in self._parts]
        device = self._device(sources)
        if self._memory is None or self._memory.device != device:
            self._memory = plain_memory(self._nbytes, device)
        works = [
            (part.spec.format, Work(part.spec.name, source, self._value(part), self._scale(part)))
            for part, source in zip(self._parts, sources, strict=True)
        ]
        matrices = [work for form, work in works if form is Format.FP8_TENSOR]
        self._chunks = ChunkedParts(works, self._order, device, self._fault)
        self._matrices = compile_fp8_tensor(matrices) if matrices else None
        whole = [s for s in self._wanted.values() if s.format is Format.FP8_TENSOR]
        boxes = [(p.spec, p.box) for p in self._parts if p.spec.format is Format.FP8_TENSOR]
        # Also on a rank that holds none of them: the others wait for it in reduce_max.
        self._scales = SharedScales(whole, boxes, device) if whole else None

    def _device(self, sources: Sequence[torch.Tensor]) -> torch.device:
        if sources:
            return sources[0].device
        plain = next((r.base for r in self._regions if r.part < 0), None)
        return torch.device("cpu") if plain is None else self._source.region(plain).device

    def synchronize(self) -> None:
        """Waits until what :meth:`ready` enqueued on the current stream is in memory."""
        if self._memory is not None and self._memory.is_cuda:
            torch.cuda.current_stream(self._memory.device).synchronize()

    def check(self, seconds: float | None = None) -> None:
        """Waits until everything is quantized and refuses what no format can hold.

        Args:
            seconds: Longest wait; ``WEIGHT_SYNC_DEADLINE_S`` by default.

        Raises:
            QuantizationError: Naming tensors with infinities.
            RefitError: If quantizing failed, or weights were published anew or given back.
            DeadlineError: If it did not end in time.
        """
        deadline = Deadline(deadline_seconds() if seconds is None else seconds)
        found = {} if self._chunks is None else self._chunks.infinities(deadline)
        if self._matrices is not None:
            found |= self._matrices.infinities(deadline.remaining())
        refuse_infinities(found)

    def fingerprint(self) -> object:
        """Changes when any local tensor or the quantized memory lies somewhere else."""
        memory = self._memory
        return self._source.fingerprint(), None if memory is None else memory.data_ptr()

    def forget(self) -> None:
        """Gives the quantized memory back; the next :meth:`ready` makes it again.

        Raises:
            DeadlineError: If what :meth:`start` began does not end.
        """
        self.end(deadline_seconds(), early=True)
        self._memory = None
        self._chunks = None
        self._matrices = None
        self._scales = None
        self._compiled_for = None


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
