"""Puts whole tensors together on the first trainer rank, which vLLM's own senders need.

Every tensor in turn: owners send their regions to rank 0 through torch's process group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import distributed

from weight_sync.layout import Box
from weight_sync.manifest import Manifest
from weight_sync.sources.base import WeightSource


class Gatherer:
    """One rank's part; all ranks make one and run :meth:`tensors` at the same time.

    Args:
        source: The rank's weights.
        manifest: Its manifest.
        ranks: Number of trainer ranks; with more than one torch's process group must be there.
        names: Names and shapes in the order in which they are wanted.
        device: Where whole tensors are made.
    """

    def __init__(
        self,
        source: WeightSource,
        manifest: Manifest,
        ranks: int,
        names: Sequence[tuple[str, tuple[int, ...]]],
        device: torch.device,
    ) -> None:
        self._source = source
        self._rank = manifest.rank
        self._names = names
        self._device = device
        mine = [(spec.name, box) for spec, box in manifest.regions()]
        offered: list[list[tuple[str, Box]]] = [mine]
        if ranks > 1:
            offered = [[] for _ in range(ranks)]
            distributed.all_gather_object(offered, mine)
        self._owners: dict[str, dict[Box, tuple[int, int]]] = {name: {} for name, _ in names}
        for rank, regions in enumerate(offered):
            for number, (name, box) in enumerate(regions):
                # Of replicas the lowest rank sends.
                self._owners[name].setdefault(box, (rank, number))

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors on rank 0; other ranks send, and get nothing but must run to the end."""
        for name, shape in self._names:
            owners = self._owners[name]
            if self._rank == 0:
                yield name, self._whole(shape, owners)
                continue
            for rank, number in owners.values():
                if rank == self._rank:
                    distributed.send(self._source.region(number).contiguous(), 0)

    def _whole(self, shape: tuple[int, ...], owners: dict[Box, tuple[int, int]]) -> torch.Tensor:
        if len(owners) == 1:
            ((rank, number),) = owners.values()
            if rank == 0:
                return self._source.region(number)
        out: torch.Tensor | None = None
        for box, (rank, number) in owners.items():
            if out is None:
                out = torch.empty(shape, dtype=torch.bfloat16, device=self._device)
            place = out[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
            if rank == 0:
                place.copy_(self._source.region(number))
            elif place.is_contiguous():
                distributed.recv(place, rank)
            else:
                part = torch.empty(box.size, dtype=torch.bfloat16, device=self._device)
                distributed.recv(part, rank)
                place.copy_(part)
        assert out is not None
        return out
