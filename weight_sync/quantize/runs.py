"""Chunks that are quantized one after the other, so that who reads waits only for what it reads.

On a GPU all chunks are enqueued on a stream of their own and readers' streams wait for events; on
the CPU a thread makes them and readers wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import DeadlineError, RefitError
from weight_sync.faults import FaultHook
from weight_sync.quantize.work import CompiledQuantize

if TYPE_CHECKING:
    import torch

Chunk = tuple[CompiledQuantize, ...]


class Run(Protocol):
    """One pass over all chunks, which goes on after it was begun."""

    def wait(self, chunk: int, lane: torch.cuda.Stream | None, deadline: Deadline) -> None:
        """Lets what follows read a chunk and all before it.

        Args:
            chunk: Its number.
            lane: The stream that reads; None if this thread does.
            deadline: When to give up.

        Raises:
            RefitError: If quantizing failed or was ended early.
            DeadlineError: If it did not come so far in time.
        """
        ...

    def infinities(self, deadline: Deadline) -> dict[str, int]:
        """Waits for all chunks; infinite elements of the tensors that hold some.

        Raises:
            RefitError: If quantizing failed or was ended early.
            DeadlineError: If it did not end in time.
        """
        ...

    def end(self, deadline: Deadline, *, early: bool) -> None:
        """Returns when memory is neither read nor written any more, also where quantizing failed.

        Args:
            deadline: When to give up.
            early: Whether chunks that were not begun may be left out.

        Raises:
            DeadlineError: If it did not end in time.
        """
        ...


def begin(chunks: Sequence[Chunk], stream: torch.cuda.Stream | None, fault: FaultHook) -> Run:
    """Begins to quantize.

    Args:
        chunks: At least one; of each the programs that make it.
        stream: Where to enqueue, after the current stream's work; None on the CPU.
        fault: Called before each chunk with ``"quantize"`` and the bytes made before.
    """
    return HostRun(chunks, fault) if stream is None else CudaRun(chunks, stream, fault)


class HostRun:
    """A :class:`Run` on the CPU, in a thread of its own."""

    def __init__(self, chunks: Sequence[Chunk], fault: FaultHook) -> None:
        self._chunks = tuple(chunks)
        self._fault = fault
        self._changed = threading.Condition()
        self._done = 0
        self._error: Exception | None = None
        self._stopped = False
        self._thread = threading.Thread(
            target=self._quantize, name="weight-sync-quantize", daemon=True
        )
        self._thread.start()

    def _quantize(self) -> None:
        nbytes = 0
        try:
            for chunk in self._chunks:
                self._fault("quantize", nbytes)
                if self._stopped:
                    return
                for program in chunk:
                    program.run()
                    nbytes += program.nbytes
                with self._changed:
                    self._done += 1
                    self._changed.notify_all()
        except Exception as error:  # Raised where somebody waits.
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def wait(self, chunk: int, lane: torch.cuda.Stream | None, deadline: Deadline) -> None:
        """Waits in this thread; see the protocol."""
        with self._changed:
            while self._done <= chunk:
                if self._stopped or self._error is not None:
                    why = "weights were published anew or given back"
                    raise RefitError(
                        f"quantizing did not end: {self._error or why}", stage="quantize"
                    ) from self._error
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    raise _late(self._done, len(self._chunks), deadline)

    def infinities(self, deadline: Deadline) -> dict[str, int]:
        """See the protocol."""
        self.wait(len(self._chunks) - 1, None, deadline)
        return _infinities(self._chunks, deadline)

    def end(self, deadline: Deadline, *, early: bool) -> None:
        """Waits for the thread; see the protocol."""
        with self._changed:
            self._stopped = self._stopped or early
            self._changed.notify_all()
        self._thread.join(deadline.remaining())
        if self._thread.is_alive():
            raise _late(self._done, len(self._chunks), deadline)


class CudaRun:
    """A :class:`Run` on a GPU; all of it is enqueued when the constructor returns."""

    def __init__(
        self, chunks: Sequence[Chunk], stream: torch.cuda.Stream, fault: FaultHook
    ) -> None:
        import torch

        self._chunks = tuple(chunks)
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        nbytes = 0
        with torch.cuda.stream(stream):
            for chunk in self._chunks:
                fault("quantize", nbytes)
                for program in chunk:
                    program.run(stream.cuda_stream)
                    nbytes += program.nbytes

    def wait(self, chunk: int, lane: torch.cuda.Stream | None, deadline: Deadline) -> None:
        """Orders the lane, or waits in this thread if there is none; see the protocol."""
        last = self._chunks[chunk][-1]
        if lane is None:
            last.infinities(deadline.remaining())
        else:
            last.before(lane.cuda_stream)

    def infinities(self, deadline: Deadline) -> dict[str, int]:
        """See the protocol."""
        return _infinities(self._chunks, deadline)

    def end(self, deadline: Deadline, *, early: bool) -> None:
        """Waits for all of it: what is enqueued cannot be taken back."""
        self.wait(len(self._chunks) - 1, None, deadline)


def _infinities(chunks: Sequence[Chunk], deadline: Deadline) -> dict[str, int]:
    found: dict[str, int] = {}
    for chunk in chunks:
        for program in chunk:
            for name, count in program.infinities(deadline.remaining()).items():
                found[name] = found.get(name, 0) + count
    return found


def _late(done: int, total: int, deadline: Deadline) -> DeadlineError:
    return DeadlineError(
        f"{done} of {total} chunks were quantized within {deadline.seconds:g} s", stage="quantize"
    )
