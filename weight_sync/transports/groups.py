"""The communication groups of one participant and epoch, used together as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from weight_sync.comm.base import Communicator
from weight_sync.comm.connect import connect
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.watchdog import Watchdog, abort_all
from weight_sync.errors import AbortedError, DeadlineError, PeerDeadError
from weight_sync.messages import GroupSpec

if TYPE_CHECKING:
    import torch


class Groups:
    """What :func:`join_groups` built; used by one thread at a time, abortable from any."""

    def __init__(self, members: Sequence[tuple[GroupSpec, Communicator]]) -> None:
        self._all = tuple(group for _, group in members)
        # Every trainer rank is in exactly one group, and every group holds all workers.
        self._of_trainer = {
            rank: (group, place)
            for spec, group in members
            for place, rank in enumerate(spec.trainers)
        }
        self._first_worker = {id(group): len(spec.trainers) for spec, group in members}
        self._watchdog = Watchdog()

    def send_to_worker(self, buffer: torch.Tensor, worker: int) -> None:
        """Starts a send from this trainer rank, which is in one group only."""
        (group,) = self._all
        group.send(buffer, self._first_worker[id(group)] + worker)

    def receive_from_trainer(self, buffer: torch.Tensor, rank: int) -> None:
        """Starts a receive from a trainer rank."""
        group, place = self._of_trainer[rank]
        group.recv(buffer, place)

    def broadcast(self, buffer: torch.Tensor, root: int) -> None:
        """Starts a broadcast by a trainer rank to everybody in its group."""
        group, place = self._of_trainer[root]
        group.broadcast(buffer, place)

    @contextmanager
    def launch(self) -> Iterator[None]:
        """One grouped launch over all groups, in their one order."""
        with ExitStack() as stack:
            for group in self._all:
                stack.enter_context(group.group())
            yield

    @contextmanager
    def guard(self, deadline: Deadline, what: str) -> Iterator[Deadline]:
        """Aborts all groups if the block takes longer than the deadline, or raises.

        Yields:
            The deadline for waits in the block: a little sooner, because they can say whom they
            waited for and the watchdog cannot.
        """
        try:
            with self._watchdog.guard(self._all, deadline, what):
                yield Deadline(deadline.inner())
        except AbortedError as error:
            # The watchdog may fire while a wait still finds out whose fault it was.
            if isinstance(error.__cause__, DeadlineError | PeerDeadError):
                raise error.__cause__ from error
            raise

    def wait_stream(self, stream: torch.cuda.Stream | None) -> None:
        """Orders later launches after ``stream``."""
        for group in self._all:
            group.wait_stream(stream)

    def release_stream(self, stream: torch.cuda.Stream | None, deadline: Deadline) -> None:
        """Orders ``stream`` after all launches so far; on the CPU waits for them."""
        for group in self._all:
            group.release_stream(stream, deadline)

    def synchronize(self, deadline: Deadline, version: int) -> None:
        """Waits for everything launched so far.

        Raises:
            RefitError: As :meth:`weight_sync.comm.base.Communicator.synchronize`.
        """
        for group in self._all:
            group.synchronize(deadline, version=version)

    def abort(self, reason: str) -> None:
        """Ends all work of all groups; from any thread, any number of times."""
        abort_all(self._all, reason, [])

    def close(self) -> None:
        """Frees everything; unfinished work is aborted first."""
        self._watchdog.close()
        for group in self._all:
            group.close()


def join_groups(
    specs: Sequence[GroupSpec],
    name: str,
    device: torch.device,
    deadline: Deadline,
) -> Groups:
    """Builds this participant's end of every group that names it.

    Args:
        specs: All groups, in launch order.
        name: This participant.
        device: Where buffers lie.
        deadline: When to give up.

    Raises:
        WeightSyncError: As :func:`weight_sync.comm.connect.connect`; groups built before are
            aborted.
    """
    members: list[tuple[GroupSpec, Communicator]] = []
    try:
        for spec in specs:
            if name in spec.names:
                rank = spec.names.index(name)
                group = connect(spec.rendezvous, rank, spec.names, device, deadline)
                members.append((spec, group))
    except BaseException as error:
        for _, group in members:
            group.abort(f"another group could not be built: {error}")
            group.close()
        raise
    return Groups(members)


def trainer_name(rank: int) -> str:
    """How groups call a trainer rank."""
    return f"trainer {rank}"
