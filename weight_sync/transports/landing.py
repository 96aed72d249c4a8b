"""Where what arrives is put, and what a transport must offer to put it there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from weight_sync.comm.deadline import Deadline
from weight_sync.transports.groups import Groups

if TYPE_CHECKING:
    import torch

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Landing:
    """Where the pieces of one round land.

    Attributes:
        rows: int64 ``[n]``, pieces of the program.
        offset: int64 ``[n]``, byte offset of each in the arena.
        nbytes: Size of the arena.
    """

    rows: I64
    offset: I64
    nbytes: int


class Arrivals(Protocol):
    """How the bytes of one transport get into an arena."""

    @property
    def cuts(self) -> dict[str, str]:
        """Digest of the buckets per sender, to be compared with the sender's own."""
        ...

    @property
    def steps(self) -> int:
        """Number of steps in which something arrives here."""
        ...

    @property
    def scratch_bytes(self) -> int:
        """Memory held besides the arenas."""
        ...

    def landing(self, steps: range) -> Landing:
        """Where the pieces land that are complete after these steps."""
        ...

    def launch(
        self, groups: Groups, step: int, landing: Landing, arena: torch.Tensor, deadline: Deadline
    ) -> int:
        """Starts one step; returns the bytes it brings."""
        ...

    def finish(self) -> None:
        """Waits for local copies after everything of a round has arrived."""
        ...
