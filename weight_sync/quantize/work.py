"""What is quantized in one go: sources, and where their values and scales are written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from weight_sync.errors import QuantizationError, shorten

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Work:
    """One tensor to quantize; all three tensors are on one device.

    Attributes:
        name: For messages.
        source: bfloat16 or float32 ``[..., N, K]``; neighbours along K are neighbours in memory,
            other strides are free.
        value: uint8 of the same shape, contiguous; receives E4M3 bytes.
        scale: uint8 (MXFP8) or float32 of ``format.scale_shape``, contiguous.
    """

    name: str
    source: torch.Tensor
    value: torch.Tensor
    scale: torch.Tensor


class CompiledQuantize(Protocol):
    """A quantize program: compiled once for fixed storages, run every refit.

    Attributes:
        nbytes: Bytes of values and scales that one run writes.
    """

    nbytes: int

    def run(self, stream: int | None = None) -> None:
        """Quantizes everything.

        On CUDA this only enqueues; on CPU the bytes are there on return.

        Args:
            stream: CUDA stream pointer; torch's current stream of the device by default.
        """
        ...

    def before(self, stream: int) -> None:
        """Orders what is enqueued on a stream from now on after the last run.

        On CPU there is nothing to do.

        Args:
            stream: CUDA stream pointer.
        """
        ...

    def infinities(self, seconds: float | None = None) -> dict[str, int]:
        """Waits for the last run and tells which tensors hold how many infinite elements.

        Args:
            seconds: Longest wait; ``WEIGHT_SYNC_DEADLINE_S`` by default.

        Raises:
            DeadlineError: If the GPU did not finish in time.
        """
        ...

    def check(self, seconds: float | None = None) -> None:
        """Waits for the last run and refuses what it could not represent.

        Call it before the bytes count: what was written for a refused tensor is not its value.

        Args:
            seconds: Longest wait; ``WEIGHT_SYNC_DEADLINE_S`` by default.

        Raises:
            QuantizationError: Naming the tensors that hold infinities, and how many.
            DeadlineError: If the GPU did not finish in time.
        """
        ...


class CompiledFp8Tensor(CompiledQuantize, Protocol):
    """FP8 per tensor, in two steps for ranks that share a matrix: ``run`` is one after the other.

    Attributes:
        amax: float32 ``[matrices]``, in the order of the works and of the experts in each: what
            ``measure`` leaves and ``cast`` uses. Ranks reduce it by maximum in between.
    """

    amax: torch.Tensor

    def measure(self, stream: int | None = None) -> None:
        """Writes the largest finite magnitude of every matrix to ``amax``."""
        ...

    def cast(self, stream: int | None = None) -> None:
        """Writes values and scales from what ``amax`` holds."""
        ...


def refuse_infinities(found: Mapping[str, int]) -> None:
    """Raises if any tensor holds infinities.

    Args:
        found: Infinite elements of the tensors that hold some.

    Raises:
        QuantizationError: Naming the tensors.
    """
    if found:
        listed = shorten(f"{name} ({count})" for name, count in found.items())
        raise QuantizationError(
            f"infinite weights cannot be quantized to E4M3: {listed}. The trainer has diverged; "
            "go back to a checkpoint, or leave these names unquantized"
        )


def count_by_name(works: Sequence[Work], counts: Sequence[int]) -> dict[str, int]:
    """Adds up counts that are not 0 of works with the same name.

    Args:
        works: A rank may hold several regions of one tensor.
        counts: One per work.
    """
    out: dict[str, int] = {}
    for work, count in zip(works, counts, strict=True):
        if count:
            out[work.name] = out.get(work.name, 0) + count
    return out
