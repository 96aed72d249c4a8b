"""Runs one call on several participants at once; every outcome is looked at, with one deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import DeadlineError, RefitError, WeightSyncError

K = TypeVar("K")
T = TypeVar("T")


def run_all(
    participants: Mapping[str, K],
    call: Callable[[K], T],
    deadline: Deadline,
    stage: str,
    version: int | None = None,
    epoch: int | None = None,
) -> tuple[dict[str, T], dict[str, WeightSyncError]]:
    """Calls every participant in a thread of its own.

    A call that is stuck keeps its daemon thread but nobody waits for it longer than the deadline.

    Args:
        participants: Name -> what ``call`` takes.
        call: What is done with each.
        deadline: Shared by all.
        stage: For errors.
        version: For errors.
        epoch: For errors.

    Returns:
        Results of those that succeeded and errors of the others, by participant.
    """
    futures: dict[Future[T], str] = {}
    for who, participant in participants.items():
        future: Future[T] = Future()
        futures[future] = who
        threading.Thread(
            target=_run,
            args=(future, call, participant),
            name=f"weight-sync-{stage}-{who}",
            daemon=True,
        ).start()
    pending = set(futures)
    while pending and not deadline.expired:
        _, pending = wait(pending, timeout=deadline.remaining(), return_when=FIRST_COMPLETED)
    results: dict[str, T] = {}
    errors: dict[str, WeightSyncError] = {}
    for future, who in futures.items():
        if not future.done():
            errors[who] = DeadlineError(
                f"{who} did not finish {stage} within {deadline.seconds:g} s",
                stage=stage,
                version=version,
                epoch=epoch,
                ranks=[who],
            )
            continue
        error = future.exception()
        if error is None:
            results[who] = future.result()
        elif isinstance(error, WeightSyncError):
            errors[who] = error
        else:
            errors[who] = RefitError(
                f"{who} failed: {type(error).__name__}: {error}",
                stage=stage,
                version=version,
                epoch=epoch,
                ranks=[who],
            )
            errors[who].__cause__ = error
    return results, errors


def _run(future: Future[T], call: Callable[[K], T], participant: K) -> None:
    try:
        future.set_result(call(participant))
    except BaseException as error:  # Handed to whoever reads the future.
        future.set_exception(error)


def raise_first(errors: Mapping[str, WeightSyncError]) -> None:
    """Raises the most telling error, with the others as notes; nothing if there is none.

    An error that says why something failed comes before one that only says nobody answered.
    """
    if not errors:
        return
    ordered = sorted(errors.items(), key=lambda item: isinstance(item[1], DeadlineError))
    first = ordered[0][1]
    for who, other in ordered[1:]:
        first.add_note(f"{who}: {other}")
    raise first
