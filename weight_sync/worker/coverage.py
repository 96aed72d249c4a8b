"""Counts the distinct elements that strided writes reach, however they overlap.

Loaders write thousands of views into one parameter (experts, fused projections), nearly always side
by side. That is proved here from offsets, sizes and strides alone; only what really overlaps is
marked element by element.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from weight_sync.strided import StridedView


@dataclass(frozen=True)
class _Write:
    """A view whose dimensions are ``(size, stride)``, longest stride first, merged where dense."""

    start: int
    dims: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        return self.start + sum((n - 1) * s for n, s in self.dims) + 1

    @property
    def elements(self) -> int:
        return prod(n for n, _ in self.dims)


def covered(views: Iterable[StridedView]) -> int:
    """Distinct elements of one storage that at least one of the views holds.

    Args:
        views: Writes into the storage; none holds an element twice.
    """
    return _covered(sorted({_write(v) for v in views if 0 not in v.size}, key=_start))


def _start(write: _Write) -> int:
    return write.start


def _write(view: StridedView) -> _Write:
    dims: list[tuple[int, int]] = []
    for stride, size in sorted(zip(view.stride, view.size, strict=True), reverse=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == stride * size:
            dims[-1] = dims[-1][0] * size, stride
        else:
            dims.append((size, stride))
    return _Write(view.offset, tuple(dims))


def _covered(writes: Sequence[_Write]) -> int:
    """The same of distinct writes, sorted by where they start."""
    total, at = 0, 0
    while at < len(writes):
        first, end = at, writes[at].end
        at += 1
        while at < len(writes) and writes[at].start < end:
            end = max(end, writes[at].end)
            at += 1
        total += _touching(writes[first:at], end)
    return total


def _touching(writes: Sequence[_Write], end: int) -> int:
    """Of writes whose spans touch, up to ``end``."""
    if len(writes) == 1:
        return writes[0].elements
    start = writes[0].start
    outer = {w.dims[0] if w.dims else (1, 0) for w in writes}
    if len(outer) == 1:
        # Columns side by side: the same in every row, if no row reaches into the next one.
        ((rows, stride),) = outer
        inner = sorted({_Write(w.start, w.dims[1:]) for w in writes}, key=_start)
        if max(w.end for w in inner) - start <= stride:
            return rows * _covered(inner)
    flat = torch.zeros(end - start, dtype=torch.bool)
    for w in writes:
        sizes, strides = [n for n, _ in w.dims], [s for _, s in w.dims]
        flat.as_strided(sizes, strides, w.start - start).fill_(True)
    return int(flat.sum())
