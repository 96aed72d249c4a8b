"""What a transport may ask of a group of ranks, whichever library carries the bytes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import TransportError

if TYPE_CHECKING:
    import torch


@runtime_checkable
class Communicator(Protocol):
    """A group of ranks built for one epoch, used by one thread and abortable from any other.

    Buffers are one-dimensional contiguous ``uint8`` tensors on :attr:`device`. Both sides must
    use the same length: it comes from the plan, never from the wire. A buffer of no bytes is
    not sent at all, on either side. Calls start work and return; :meth:`synchronize` waits.
    After an abort or an error the group is unusable and must be rebuilt under a new epoch.

    A launch may wait on the host for a peer (NCCL connects pairs on first use), so launches
    belong inside a :class:`~weight_sync.comm.watchdog.Watchdog` guard.
    """

    @property
    def rank(self) -> int:
        """This participant's place in the group."""

    @property
    def world_size(self) -> int:
        """How many participants the group has."""

    @property
    def epoch(self) -> int:
        """Membership epoch the group was built for."""

    @property
    def device(self) -> torch.device:
        """Where buffers must live."""

    @property
    def aborted(self) -> str | None:
        """Why the group was aborted, or ``None`` while it is good."""

    def send(self, buf: torch.Tensor, peer: int) -> None:
        """Starts sending all of ``buf`` to ``peer``; ``buf`` must stay unchanged until waited."""

    def recv(self, buf: torch.Tensor, peer: int) -> None:
        """Starts filling all of ``buf`` from ``peer``."""

    def broadcast(self, buf: torch.Tensor, root: int) -> None:
        """Starts copying ``buf`` of ``root`` into ``buf`` of everyone; all ranks must call."""

    def group_start(self) -> None:
        """Begins a grouped launch; groups of several communicators may be nested."""

    def group_end(self) -> None:
        """Launches what was collected since the outermost :meth:`group_start` of this thread."""

    def group(self) -> AbstractContextManager[None]:
        """A grouped launch as a ``with`` block; an exception inside aborts the group."""

    def wait_stream(self, stream: torch.cuda.Stream | None) -> None:
        """Orders later launches after the work now queued on ``stream`` (``None``: no-op)."""

    def release_stream(self, stream: torch.cuda.Stream | None, deadline: Deadline) -> None:
        """Orders later work on ``stream`` after everything launched so far.

        On CUDA this does not block; bytes seen that way are proven only by a later
        :meth:`synchronize`, because aborted transfers finish without an error. On the CPU it
        is :meth:`synchronize`.
        """

    def synchronize(
        self, deadline: Deadline, *, stage: str = "transfer", version: int | None = None
    ) -> None:
        """Waits until everything launched so far is complete.

        Raises:
            DeadlineError: The deadline passed; names the peers that did not deliver. The group
                is aborted.
            PeerDeadError: A peer's process is gone. The group is aborted.
            AbortedError: This group was aborted here, or a peer aborted it and said why.
        """

    def meet(self, stage: str, deadline: Deadline) -> None:
        """Waits until every rank has called this for ``stage``; errors as :meth:`synchronize`."""

    def abort(self, reason: str) -> None:
        """Ends all work in flight; from any thread, any number of times, the first reason stays."""

    def close(self) -> None:
        """Frees sockets, threads and memory; unfinished work is aborted first.

        Call it once all ranks have synchronized, or after an abort.
        """


def check_buffer(buf: torch.Tensor, device: torch.device) -> None:
    """Refuses a buffer that could not be sent as plain bytes.

    Raises:
        TransportError: Not one-dimensional, not ``uint8``, not contiguous or on another device.
    """
    kind = str(buf.dtype).removeprefix("torch.")
    if buf.dim() != 1 or kind != "uint8" or not buf.is_contiguous() or buf.device != device:
        raise TransportError(
            f"a communicator moves contiguous one-dimensional uint8 tensors on {device}, not "
            f"{kind} of shape {tuple(buf.shape)} on {buf.device}; "
            "pass tensor.view(torch.uint8).flatten()"
        )


def check_peer(peer: int, world_size: int, rank: int | None) -> None:
    """Refuses a rank outside the group, or ``rank`` itself when it is given.

    Raises:
        TransportError: The peer cannot be reached in this group.
    """
    if not 0 <= peer < world_size or peer == rank:
        raise TransportError(
            f"rank {peer} is not a peer of rank {rank} in a group of {world_size}; "
            "the plan and the group were built for different memberships, rebuild both"
        )
