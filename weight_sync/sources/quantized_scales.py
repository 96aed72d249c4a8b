"""One FP8 scale per matrix, where several regions or several ranks hold parts of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch

from weight_sync.layout import Box
from weight_sync.quantize.wanted import QuantSpec


class SharedScales:
    """Makes the maxima of all parts of a matrix equal before they are cast.

    The vector that ranks reduce has one entry per matrix of the whole model, in the order of the
    names, so that it means the same on every rank whatever the rank holds.

    Args:
        wanted: All FP8-per-tensor tensors of the model, sorted by name.
        parts: The regions this rank quantizes, in the order of the program's ``amax``.
        device: Where the program runs.
    """

    def __init__(
        self,
        wanted: Sequence[QuantSpec],
        parts: Sequence[tuple[QuantSpec, Box]],
        device: torch.device,
    ) -> None:
        first: dict[str, int] = {}
        total = 0
        for spec in wanted:
            first[spec.name] = total
            total += prod(spec.value_shape[:-2])
        index = [
            first[spec.name] + int(np.ravel_multi_index(at, lead)) if lead else first[spec.name]
            for spec, box in parts
            for lead in (spec.value_shape[:-2],)
            for at in _positions(box)
        ]
        self._index = torch.tensor(index, dtype=torch.int64, device=device)
        self._whole = torch.zeros(total, dtype=torch.float32, device=device)

    def unite(
        self, amax: torch.Tensor | None, reduce: Callable[[torch.Tensor], None] | None
    ) -> None:
        """Replaces every entry of ``amax`` by the maximum over its whole matrix.

        Args:
            amax: float32 ``[matrices of all parts]``, of the regions alone; changed in place. None
                on a rank that holds none.
            reduce: Takes the maximum over all ranks in place; None where this rank holds every
                matrix whole.
        """
        self._whole.zero_()
        if amax is not None:
            self._whole.scatter_reduce_(0, self._index, amax, "amax")
        if reduce is not None:
            reduce(self._whole)
        if amax is not None:
            amax.copy_(self._whole[self._index])


def _positions(box: Box) -> list[tuple[int, ...]]:
    """Global indices of the matrices that a region holds parts of, in row-major order."""
    return [
        tuple(o + i for o, i in zip(box.offset, at, strict=False))
        for at in np.ndindex(*box.size[:-2])
    ]
