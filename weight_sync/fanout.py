"""Runs one call on several participants at once; every outcome is looked at, with one deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TypeVar

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import AbortedError, DeadlineError, RefitError, WeightSyncError

# Longest wait between two looks at whether the deadline was ended early.
_SLICE_SECONDS = 0.1

K = TypeVar("K")
T = TypeVar("T")


def run_all(
    participants: Mapping[str, K],
    call: Callable[[K], T],
    deadline: Deadline,
    stage: str,
    version: int | None = None,
    epoch: int | None = None,
    failed: Callable[[str], None] | None = None,
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
        failed: Called once, with the first participant whose call raised, while others go on.

    Returns:
        Results of those that succeeded and errors of the others, by participant; errors in the
        order in which they came.
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
    ended: dict[Future[T], None] = {}
    while pending and not deadline.expired:
        timeout = min(deadline.remaining(), _SLICE_SECONDS)
        done, pending = wait(pending, timeout=timeout, return_when=FIRST_COMPLETED)
        ended |= dict.fromkeys(done)
        wrong = next((f for f in done if f.exception() is not None), None)
        if failed is not None and wrong is not None:
            failed(futures[wrong])
            failed = None
    results: dict[str, T] = {}
    errors: dict[str, WeightSyncError] = {}
    for future in ended | dict.fromkeys(futures):
        who = futures[future]
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
        elif isinstance(error, RefitError):
            errors[who] = located(error, version, epoch, (who,))
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


def located(
    error: RefitError,
    version: int | None,
    epoch: int | None,
    ranks: tuple[str, ...],
    remedy: str = "",
) -> RefitError:
    """The error, with what it does not say itself."""
    known = (error.version, error.epoch, error.ranks, error.remedy)
    filled = (
        version if error.version is None else error.version,
        epoch if error.epoch is None else error.epoch,
        error.ranks or ranks,
        error.remedy or remedy,
    )
    if known == filled:
        return error
    full = type(error)(
        error.reason,
        stage=error.stage,
        version=filled[0],
        epoch=filled[1],
        ranks=filled[2],
        remedy=filled[3],
    )
    full.__cause__ = error.__cause__ or error
    for note in getattr(error, "__notes__", ()):
        full.add_note(note)
    return full


def raise_first(errors: Mapping[str, WeightSyncError]) -> None:
    """Raises the most telling error, with the others as notes; nothing if there is none.

    An error that says why something failed comes before one that only says that others gave up, and
    that before one that says nobody answered.
    """
    if not errors:
        return
    ordered = sorted(
        errors.items(),
        key=lambda e: 2 * isinstance(e[1], DeadlineError) + isinstance(e[1], AbortedError),
    )
    first = ordered[0][1]
    for who, other in ordered[1:]:
        first.add_note(f"{who}: {other}")
    raise first
