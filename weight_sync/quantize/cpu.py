"""Quantize programs on the CPU: the reference, written into given memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weight_sync.quantize.format import Format
from weight_sync.quantize.reference import encode, finite_amax
from weight_sync.quantize.work import Work, count_by_name, refuse_infinities


class CpuQuantize:
    """:class:`~weight_sync.quantize.work.CompiledQuantize` on the CPU."""

    def __init__(self, form: Format, works: Sequence[Work]) -> None:
        self.nbytes = sum(w.value.nbytes + w.scale.nbytes for w in works)
        self._form = form
        self._works = tuple(works)
        self._infinities = [0] * len(works)

    def run(self, stream: int | None = None) -> None:
        """Quantizes everything; ``stream`` has no meaning here."""
        self._encode([None] * len(self._works))

    def before(self, stream: int) -> None:
        """The bytes are there when :meth:`run` returns."""

    def infinities(self, seconds: float | None = None) -> dict[str, int]:
        """Infinite elements of the tensors that hold some; there is nothing to await."""
        return count_by_name(self._works, self._infinities)

    def check(self, seconds: float | None = None) -> None:
        """Raises QuantizationError naming tensors with infinities."""
        refuse_infinities(self.infinities(seconds))

    def _encode(self, amax: Sequence[torch.Tensor | None]) -> None:
        for number, (work, largest) in enumerate(zip(self._works, amax, strict=True)):
            encoded = encode(self._form, work.source, largest)
            work.value.copy_(encoded.value)
            work.scale.copy_(encoded.scale)
            self._infinities[number] = int(encoded.infinities)


class CpuFp8Tensor(CpuQuantize):
    """:class:`~weight_sync.quantize.work.CompiledFp8Tensor` on the CPU."""

    def __init__(self, form: Format, works: Sequence[Work]) -> None:
        super().__init__(form, works)
        self._matrices = [w.scale.numel() for w in works]
        self.amax = torch.zeros(sum(self._matrices), dtype=torch.float32)

    def run(self, stream: int | None = None) -> None:
        """Measures, then casts."""
        self.measure()
        self.cast()

    def measure(self, stream: int | None = None) -> None:
        """Writes the largest finite magnitude of every matrix to ``amax``."""
        for work, part in zip(self._works, self.amax.split(self._matrices), strict=True):
            part.copy_(finite_amax(work.source).reshape(-1))

    def cast(self, stream: int | None = None) -> None:
        """Writes values and scales from what ``amax`` holds."""
        parts = self.amax.split(self._matrices)
        self._encode([p.reshape(w.scale.shape) for p, w in zip(parts, self._works, strict=True)])
