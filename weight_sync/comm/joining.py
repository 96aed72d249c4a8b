"""The steps that building a group has in common for gloo and NCCL, each with a named failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from weight_sync.comm.attendance import Attendance
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.facts import EnvironmentFacts, compare_environments, gather_facts
from weight_sync.comm.rendezvous import Rendezvous
from weight_sync.errors import DeadlineError, TransportError, WeightSyncError

if TYPE_CHECKING:
    import torch


class _Abortable(Protocol):
    def abort(self, reason: str) -> None: ...

    def close(self) -> None: ...


C = TypeVar("C", bound=_Abortable)


def join(
    rendezvous: Rendezvous,
    rank: int,
    names: Sequence[str],
    device: torch.device,
    deadline: Deadline,
    build: Callable[[Attendance, Sequence[EnvironmentFacts]], C],
) -> C:
    """Meets the other ranks, compares environments, builds, and meets again.

    A rank that fails says so in the store, so the others end at once instead of at their deadline.

    Args:
        rendezvous: Where the group meets.
        rank: This rank.
        names: Participants by rank.
        device: Device of the group's buffers.
        deadline: When to give up.
        build: Makes the communicator once all ranks are present and their facts agree.

    Returns:
        What ``build`` made, on every rank or on none.

    Raises:
        WeightSyncError: As :func:`weight_sync.comm.gloo.connect_gloo` documents.
    """
    attendance = Attendance(rendezvous, rank, names, deadline)
    built: C | None = None
    try:
        facts = gather_facts(names[rank], device)
        payloads = attendance.arrive("present", deadline, msgspec.msgpack.encode(facts))
        everyone = [msgspec.msgpack.decode(raw, type=EnvironmentFacts) for raw in payloads]
        compare_environments(everyone)
        built = build(attendance, everyone)
        attendance.arrive("built", deadline)
    except BaseException as error:
        attendance.leave(f"could not connect: {error}", error)
        if built is not None:
            built.abort(str(error))
            built.close()
        attendance.close()
        if isinstance(error, RuntimeError):
            raise _named(error, attendance, deadline) from error
        raise
    return built


def _named(error: RuntimeError, attendance: Attendance, deadline: Deadline) -> WeightSyncError:
    """What a native library's error while connecting means."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, WeightSyncError):
            return cause
        cause = cause.__cause__ or cause.__context__
    if deadline.expired:
        return DeadlineError(
            f"the ranks were present but did not connect within {deadline.seconds:g} s: {error}",
            stage="connect",
            epoch=attendance.epoch,
            remedy="check that every participant can reach the others' addresses, then rebuild",
        )
    return TransportError(
        f"the group could not be built at epoch {attendance.epoch}: {error}; "
        "rebuild under a new rendezvous"
    )
