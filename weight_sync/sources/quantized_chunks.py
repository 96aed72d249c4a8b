"""What a rank quantizes, cut into chunks in the order in which it travels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.comm.deadline import Deadline
from weight_sync.faults import FaultHook
from weight_sync.quantize.compiler import compile_quantize
from weight_sync.quantize.format import Format
from weight_sync.quantize.runs import Chunk, Run, begin
from weight_sync.quantize.work import Work

I64 = NDArray[np.int64]

# Bytes that are read for one chunk. A GPU needs about a tenth of a millisecond for so many, which
# is little beside a bucket on any wire and much beside the launch of a kernel.
CHUNK_BYTES = 256 << 20


class ChunkedParts:
    """Compiled chunks, and their last run.

    Args:
        works: One per part, with its format.
        order: Parts to quantize, in the order in which they are needed; others are left alone.
        device: Where they lie.
        fault: For fault injection in tests.
    """

    def __init__(
        self,
        works: Sequence[tuple[Format, Work]],
        order: Sequence[int],
        device: torch.device,
        fault: FaultHook,
    ) -> None:
        groups = cut_chunks(order, [work.source.nbytes for _, work in works], CHUNK_BYTES)
        self._chunk = np.full(len(works), -1, np.int64)
        for number, parts in enumerate(groups):
            self._chunk[parts] = number
        self._chunks = [_compile([works[part] for part in parts]) for parts in groups]
        # Readers wait for its events; on the trainer's own stream everybody would wait for all.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._fault = fault
        self._run: Run | None = None

    def start(self) -> None:
        """Begins to quantize, after what the current stream holds; returns at once."""
        self._run = begin(self._chunks, self._stream, self._fault) if self._chunks else None

    def wait(self, parts: I64, lane: torch.cuda.Stream | None, deadline: Deadline) -> None:
        """Lets what follows read parts; see :meth:`weight_sync.quantize.runs.Run.wait`."""
        chunk = int(self._chunk[parts].max(initial=-1))
        if self._run is not None and chunk >= 0:
            self._run.wait(chunk, lane, deadline)

    def infinities(self, deadline: Deadline) -> dict[str, int]:
        """Waits for all; see :meth:`weight_sync.quantize.runs.Run.infinities`."""
        return {} if self._run is None else self._run.infinities(deadline)

    def end(self, deadline: Deadline, *, early: bool) -> None:
        """See :meth:`weight_sync.quantize.runs.Run.end`."""
        if self._run is not None:
            self._run.end(deadline, early=early)


def cut_chunks(order: Sequence[int], nbytes: Sequence[int], limit: int) -> list[list[int]]:
    """Cuts parts into chunks that end as soon as they reach a size.

    Args:
        order: Numbers of the parts.
        nbytes: Size of each part, by number.
        limit: Least size of a chunk, but for the last one.
    """
    chunks: list[list[int]] = []
    room = 0
    for part in order:
        if room <= 0:
            chunks.append([])
            room = limit
        chunks[-1].append(part)
        room -= nbytes[part]
    return chunks


def _compile(works: Sequence[tuple[Format, Work]]) -> Chunk:
    by_format: dict[Format, list[Work]] = {}
    for form, work in works:
        by_format.setdefault(form, []).append(work)
    return tuple(compile_quantize(form, group) for form, group in by_format.items())
