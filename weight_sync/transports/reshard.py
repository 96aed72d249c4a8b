"""Reshard: every worker receives only the bytes it needs, straight from the ranks that own them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from weight_sync.comm.deadline import Deadline
from weight_sync.program import ReceiverProgram
from weight_sync.transports.groups import Groups, trainer_name
from weight_sync.transports.landing import Landing
from weight_sync.transports.packed import cut_stream, cuts_digest

if TYPE_CHECKING:
    import torch

I64 = NDArray[np.int64]


class ReshardArrivals:
    """The engine side: buckets land in the arena as they are.

    In step ``k`` bucket ``k`` of every sender arrives, in one grouped launch.

    Args:
        program: The worker's part of the plan.
        item: int64 ``[n]``, bytes per element of each piece on the wire.
        bucket_bytes: Where streams are cut.
    """

    def __init__(self, program: ReceiverProgram, item: I64, bucket_bytes: int) -> None:
        sender = program.sender.unpack()
        size = program.size.unpack().astype(np.int64)
        unit = program.unit.unpack().astype(np.int32)
        self._streams = {}
        for rank in np.unique(sender).tolist():
            rows = np.flatnonzero(sender == rank)
            self._streams[rank] = cut_stream(rows, size[rows], item[rows], unit[rows], bucket_bytes)
        self.scratch_bytes = 0
        self.steps = max((s.count for s in self._streams.values()), default=0)
        self.cuts = {trainer_name(r): cuts_digest(s.nbytes) for r, s in self._streams.items()}
        self._base: dict[tuple[int, int], int] = {}

    def landing(self, steps: range) -> Landing:
        """Buckets of these steps, one after the other."""
        rows, offset, at = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
        for step in steps:
            for rank, stream in self._streams.items():
                if step < stream.count:
                    members = stream.members(step)
                    self._base[step, rank] = at
                    rows.append(stream.rows[members])
                    offset.append(stream.offset[members] + at)
                    at += int(stream.nbytes[step])
        return Landing(np.concatenate(rows), np.concatenate(offset), at)

    def launch(
        self, groups: Groups, step: int, landing: Landing, arena: torch.Tensor, deadline: Deadline
    ) -> int:
        """Posts the receives of one step."""
        total = 0
        with groups.launch():
            for rank, stream in self._streams.items():
                if step < stream.count:
                    base, nbytes = self._base[step, rank], int(stream.nbytes[step])
                    groups.receive_from_trainer(arena[base : base + nbytes], rank)
                    total += nbytes
        return total

    def finish(self) -> None:
        """Nothing is copied on the way."""
