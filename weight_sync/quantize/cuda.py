"""Quantize programs on a GPU: one launch per source dtype for any number of tensors.

Memory-bound kernels (``kernels/cuda/mxfp8.cu``, ``fp8_block.cu``, ``fp8_tensor.cu``), bit-equal to
``reference.py``. The E4M3 conversion is an instruction of compute capability 8.9 and later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import torch

from weight_sync.env import deadline_seconds
from weight_sync.errors import DeadlineError, EnvironmentUnsupportedError
from weight_sync.kernels.cuda_module import launch
from weight_sync.quantize.format import Format
from weight_sync.quantize.table import Operand, job_table, matrices
from weight_sync.quantize.work import Work, count_by_name, refuse_infinities

_POLL_SECONDS = 50e-6
_LEAST_CAPABILITY = (8, 9)
_SOURCE = {
    Format.MXFP8: "mxfp8.cu",
    Format.FP8_BLOCK: "fp8_block.cu",
    Format.FP8_TENSOR: "fp8_tensor.cu",
}


@dataclass(frozen=True)
class _Batch:
    """Everything of one source dtype, with its tables on the device."""

    dtype: str
    jobs: torch.Tensor
    tile_job: torch.Tensor


class CudaQuantize:
    """:class:`~weight_sync.quantize.work.CompiledQuantize` on a GPU."""

    def __init__(self, form: Format, works: Sequence[Work]) -> None:
        self.nbytes = sum(w.value.nbytes + w.scale.nbytes for w in works)
        self._form = form
        self._works = tuple(works)
        self._device = works[0].source.device
        _require(self._device)
        # FP8 per tensor counts and measures per matrix, the others per tensor.
        self._slots = [w.scale.numel() if form is Format.FP8_TENSOR else 1 for w in works]
        self._infinities = torch.zeros(sum(self._slots), dtype=torch.int32, device=self._device)
        self._counts = torch.zeros(sum(self._slots), dtype=torch.int32, pin_memory=True)
        self._counted = self._event()
        self._batches = self._tables()
        self._stream = self._pointer(None)

    def run(self, stream: int | None = None) -> None:
        """Enqueues the launches on ``stream``, or on torch's current stream."""
        self._begin(stream)
        self._launch(self._form.value, self._infinities)
        self._report()

    def before(self, stream: int) -> None:
        """Makes a stream wait for the last run, which on it ends with the counts."""
        from cupy.cuda import runtime

        with torch.cuda.device(self._device):
            runtime.streamWaitEvent(stream, self._counted.ptr)

    def infinities(self, seconds: float | None = None) -> dict[str, int]:
        """Waits for the counts of the last run; see the protocol."""
        limit = deadline_seconds() if seconds is None else seconds
        end = time.monotonic() + limit
        while not self._counted.done:
            if time.monotonic() > end:
                raise DeadlineError(
                    f"{self._device} did not finish quantizing {len(self._works)} tensors within "
                    f"{limit} s",
                    stage="quantize",
                )
            time.sleep(_POLL_SECONDS)
        counts = [int(part.sum()) for part in self._counts.split(self._slots)]
        return count_by_name(self._works, counts)

    def check(self, seconds: float | None = None) -> None:
        """Refuses infinities, as the protocol says."""
        refuse_infinities(self.infinities(seconds))

    def _event(self) -> Any:  # noqa: ANN401
        import cupy

        with torch.cuda.device(self._device):
            return cupy.cuda.Event(disable_timing=True)

    def _pointer(self, stream: int | None) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream if stream is None else stream

    def _begin(self, stream: int | None) -> None:
        self._stream = self._pointer(stream)
        self._clear(self._infinities)

    def _clear(self, tensor: torch.Tensor) -> None:
        from cupy.cuda import runtime

        # Not tensor.zero_(): that would run on torch's current stream instead.
        if tensor.numel():
            with torch.cuda.device(self._device):
                runtime.memsetAsync(tensor.data_ptr(), 0, tensor.nbytes, self._stream)

    def _report(self) -> None:
        """Enqueues the way of the counts to the host, so that check() waits for nothing later."""
        from cupy.cuda import runtime

        with torch.cuda.device(self._device):
            if self._counts.numel():
                runtime.memcpyAsync(
                    self._counts.data_ptr(),
                    self._infinities.data_ptr(),
                    self._counts.nbytes,
                    runtime.memcpyDeviceToHost,
                    self._stream,
                )
            runtime.eventRecord(self._counted.ptr, self._stream)

    def _launch(self, kernel: str, *extra: torch.Tensor) -> None:
        for batch in self._batches:
            tables = [batch.jobs.data_ptr(), batch.tile_job.data_ptr()]
            launch(
                _kernel(self._form, f"{kernel}_{batch.dtype}", self._device.index),
                self._device.index,
                self._stream,
                batch.tile_job.numel(),
                [*tables, *(t.data_ptr() for t in extra)],
            )

    def _tables(self) -> list[_Batch]:
        batches: dict[str, list[Operand]] = {}
        slot = 0
        for work, slots in zip(self._works, self._slots, strict=True):
            batches.setdefault(str(work.source.dtype).removeprefix("torch."), []).append(
                Operand(
                    tuple(work.source.shape),
                    tuple(work.source.stride()),
                    work.source.data_ptr(),
                    work.value.data_ptr(),
                    work.scale.data_ptr(),
                    slot,
                )
            )
            slot += slots
        out = []
        for dtype, operands in batches.items():
            itemsize: int = getattr(torch, dtype).itemsize
            parts = [m for o in operands for m in matrices(self._form, o, itemsize)]
            table = job_table(self._form, parts, itemsize)
            if len(table.tile_job):
                jobs = torch.from_numpy(table.jobs).to(self._device)
                tile_job = torch.from_numpy(table.tile_job).to(self._device)
                out.append(_Batch(dtype, jobs, tile_job))
        # The uploads ran on the stream current now; a later run may be on any other.
        torch.cuda.current_stream(self._device).synchronize()
        return out


class CudaFp8Tensor(CudaQuantize):
    """:class:`~weight_sync.quantize.work.CompiledFp8Tensor` on a GPU."""

    def __init__(self, form: Format, works: Sequence[Work]) -> None:
        super().__init__(form, works)
        # Non-negative floats order like their bits, so the kernel reduces them as integers.
        self.amax = torch.zeros(sum(self._slots), dtype=torch.float32, device=self._device)
        torch.cuda.current_stream(self._device).synchronize()

    def run(self, stream: int | None = None) -> None:
        """Enqueues both steps on ``stream``, or on torch's current stream."""
        self.measure(stream)
        self.cast(stream)

    def measure(self, stream: int | None = None) -> None:
        """Enqueues the maxima."""
        self._begin(stream)
        self._clear(self.amax)
        self._launch("measure", self._infinities, self.amax)

    def cast(self, stream: int | None = None) -> None:
        """Enqueues the cast with what ``amax`` holds when it runs."""
        self._stream = self._pointer(stream)
        self._launch("cast", self.amax)
        self._report()


def _require(device: torch.device) -> None:
    """Refuses a machine without cupy or a GPU without the conversion, before anything is built."""
    if find_spec("cupy") is None:
        raise EnvironmentUnsupportedError(
            "quantizing on a GPU needs cupy: install weight-sync[cuda13] or weight-sync[cuda12]"
        )
    found = torch.cuda.get_device_capability(device)
    if found < _LEAST_CAPABILITY:
        raise EnvironmentUnsupportedError(
            f"{device} has compute capability {found[0]}.{found[1]}; FP8 conversion needs 8.9 or "
            "later. Send bf16 and let the engine quantize"
        )


@cache
def _kernel(form: Format, function: str, device: int) -> Any:  # noqa: ANN401
    """Compiles a format's source for a device; cupy caches the binary on disk."""
    import cupy

    folder = files("weight_sync.kernels") / "cuda"
    # One text: cupy's cache key covers the source, but not files it would include.
    parts = ("common.cuh", "quantize.cuh", _SOURCE[form])
    text = "".join((folder / part).read_text() for part in parts)
    try:
        with cupy.cuda.Device(device):
            return cupy.RawModule(code=text, options=("--std=c++17",)).get_function(function)
    except (cupy.cuda.compiler.CompileException, RuntimeError) as error:
        raise EnvironmentUnsupportedError(
            f"kernel {function} does not build for cuda:{device}: {error}. A cupy of the driver's "
            "CUDA version is needed"
        ) from error
