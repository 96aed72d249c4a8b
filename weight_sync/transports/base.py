"""The Protocols every transport implements, on the engine side and on the trainer side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from weight_sync.comm.deadline import Deadline
from weight_sync.kernels.base import RawBuffer
from weight_sync.messages import TrainerEndpointInfo
from weight_sync.program import ReceiverProgram

if TYPE_CHECKING:
    import torch

I64 = NDArray[np.int64]


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Delivery:
    """Pieces that can be read now.

    Attributes:
        rows: int64, indices of pieces of the receiver program.
        buffers: Memory they lie in.
        buffer: int32 ``[len(rows)]``, index into ``buffers``.
        offset: int64 ``[len(rows)]``, element offset of each piece's first element.
        stride: int64 ``[len(rows), R]``, element strides per global dimension.
        dtypes: dtype of the elements per row, before a cast in flight.
        key: Equal keys mean equal layout and addresses, so that compiled copies can be kept.
        release: Called when nothing reads the buffers any more.
    """

    rows: I64
    buffers: Sequence[torch.Tensor | RawBuffer]
    buffer: NDArray[np.int32]
    offset: I64
    stride: I64
    dtypes: tuple[str, ...]
    key: object
    release: Callable[[], None] = field(default=_nothing)

    def take(self, which: I64) -> Delivery:
        """Some of the pieces, with only the memory they lie in.

        Args:
            which: int64, indices into ``rows``.
        """
        used, buffer = np.unique(self.buffer[which], return_inverse=True)
        return replace(
            self,
            rows=self.rows[which],
            buffers=[self.buffers[i] for i in used.tolist()],
            buffer=buffer.astype(np.int32),
            offset=self.offset[which],
            stride=self.stride[which],
            dtypes=tuple(self.dtypes[i] for i in which.tolist()),
        )


class ReceiverTransport(Protocol):
    """The engine side: one object per worker and epoch."""

    @property
    def extra_bytes(self) -> int:
        """Device memory held besides the engine's own."""
        ...

    def connect(
        self,
        program: ReceiverProgram,
        trainers: Sequence[TrainerEndpointInfo],
        deadline: Deadline,
    ) -> None:
        """Reaches every trainer rank the program names; called before anything live changes."""
        ...

    def transfer(self, version: int, deadline: Deadline) -> Iterator[Delivery]:
        """Yields deliveries until every piece of the program came exactly once."""
        ...

    def abort(self, reason: str) -> None:
        """Ends a running transfer from another thread; idempotent."""
        ...

    def close(self) -> None:
        """Drops connections and mappings; safe twice."""
        ...
