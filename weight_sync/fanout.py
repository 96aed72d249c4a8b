"""Runs one call on several participants at once; every outcome is looked at, with one deadline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from weight_sync import threads
from weight_sync.comm.deadline import Deadline
from weight_sync.errors import AbortedError, DeadlineError, RefitError, WeightSyncError

# Longest wait between two looks at whether the deadline was ended early.
_SLICE_SECONDS = 0.1

K = TypeVar("K")
T = TypeVar("T")


class Fanout(Generic[T]):
    """One call on every participant, begun at once, each on a thread of its own.

    A call that is stuck keeps its daemon thread but nobody waits for it longer than the deadline.

    Args:
        participants: Name -> what ``call`` takes.
        call: What is done with each.
        deadline: Shared by all.
        stage: For errors.
        version: For errors.
        epoch: For errors.
    """

    def __init__(
        self,
        participants: Mapping[str, K],
        call: Callable[[K], T],
        deadline: Deadline,
        stage: str,
        version: int | None = None,
        epoch: int | None = None,
    ) -> None:
        self._names = tuple(participants)
        self._deadline = deadline
        self._stage, self._version, self._epoch = stage, version, epoch
        self._ended: SimpleQueue[tuple[str, T | None, BaseException | None]] = SimpleQueue()
        for who, participant in participants.items():
            work = _work(who, call, participant, self._ended)
            threads.start(f"weight-sync-{stage}-{who}", work)

    def outcome(
        self, failed: Callable[[str], None] | None = None
    ) -> tuple[dict[str, T], dict[str, WeightSyncError]]:
        """Waits until all calls ended or the deadline passes; once.

        Args:
            failed: Called once, with the first participant whose call raised, while others go on.

        Returns:
            Results of those that succeeded and errors of the others, by participant; errors in the
            order in which they came.
        """
        results: dict[str, T] = {}
        errors: dict[str, WeightSyncError] = {}
        silent = dict.fromkeys(self._names)
        while silent:
            # What has come already counts, however late it is looked at.
            left = min(self._deadline.remaining(), _SLICE_SECONDS)
            try:
                who, result, error = self._ended.get(timeout=left)
            except Empty:
                if self._deadline.expired:
                    break
                continue
            del silent[who]
            if error is None:
                results[who] = result  # type: ignore[assignment]
                continue
            errors[who] = named(who, error, self._stage, self._version, self._epoch)
            if failed is not None:
                failed(who)
                failed = None
        for who in silent:
            errors[who] = DeadlineError(
                f"{who} did not finish {self._stage} within {self._deadline.seconds:g} s",
                stage=self._stage,
                version=self._version,
                epoch=self._epoch,
                ranks=[who],
            )
        return results, errors


def named(
    who: str, error: BaseException, stage: str, version: int | None, epoch: int | None
) -> WeightSyncError:
    """The error of one participant, which says whose and where it is."""
    if isinstance(error, RefitError):
        return located(error, version, epoch, (who,))
    if isinstance(error, WeightSyncError):
        return error
    refit_error = RefitError(
        f"{who} failed: {type(error).__name__}: {error}",
        stage=stage,
        version=version,
        epoch=epoch,
        ranks=[who],
    )
    refit_error.__cause__ = error
    return refit_error


def _work(
    who: str,
    call: Callable[[K], T],
    participant: K,
    ended: SimpleQueue[tuple[str, T | None, BaseException | None]],
) -> Callable[[], None]:
    # Taken out before it gets an error, which keeps the frame below: see threads.beside.
    unset = [ended]

    def work() -> None:
        try:
            result = call(participant)
        except BaseException as error:  # Handed to whoever waits for the outcome.
            unset.pop().put((who, None, error))
        else:
            unset.pop().put((who, result, None))

    return work


def run_all(
    participants: Mapping[str, K],
    call: Callable[[K], T],
    deadline: Deadline,
    stage: str,
    version: int | None = None,
    epoch: int | None = None,
    failed: Callable[[str], None] | None = None,
) -> tuple[dict[str, T], dict[str, WeightSyncError]]:
    """As :class:`Fanout` and its outcome, for who has nothing else to do meanwhile."""
    return Fanout(participants, call, deadline, stage, version, epoch).outcome(failed)


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
