"""Exceptions across processes: described for the wire on one side, raised again on the other."""

from __future__ import annotations

import traceback

from weight_sync.errors import (
    AbortedError,
    ConfigError,
    CoverageError,
    DeadlineError,
    EngineStateError,
    EnvironmentUnsupportedError,
    LayoutError,
    PeerDeadError,
    PlanMismatchError,
    QuantizationError,
    RefitError,
    ReplicaMismatchError,
    StaleEpochError,
    TransportError,
    VerifyError,
    WeightSyncError,
)
from weight_sync.messages import Failure

_REFIT_KINDS: dict[str, type[RefitError]] = {
    c.__name__: c for c in (RefitError, DeadlineError, VerifyError, AbortedError, PeerDeadError)
}
_PLAIN_KINDS: dict[str, type[WeightSyncError]] = {
    c.__name__: c
    for c in (
        ConfigError,
        EngineStateError,
        EnvironmentUnsupportedError,
        LayoutError,
        PlanMismatchError,
        QuantizationError,
        ReplicaMismatchError,
        StaleEpochError,
        TransportError,
        WeightSyncError,
    )
}


def to_failure(error: BaseException, stage: str) -> Failure:
    """Describes an exception for the wire, and lets go of what the failed call held.

    An exception and a frame that refers to it keep each other, and with them all local variables
    of the call, until Python looks for such cycles: groups, their connections, and memory. A
    generator that the error went through, and that is suspended, is closed by it.
    """
    try:
        return _describe(error, stage)
    finally:
        _clear_frames(error, set())


def _clear_frames(error: BaseException | None, seen: set[int]) -> None:
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        _clear_frames(error.__cause__, seen)
        error = error.__context__


def _describe(error: BaseException, stage: str) -> Failure:
    if isinstance(error, CoverageError):
        return Failure(
            "CoverageError",
            str(error),
            stage,
            unconsumed=error.unconsumed,
            unwritten=error.unwritten,
            disagreeing=error.disagreeing,
        )
    if isinstance(error, RefitError):
        return Failure(
            type(error).__name__,
            error.reason,
            error.stage,
            error.version,
            error.epoch,
            error.ranks,
            remedy=error.remedy,
        )
    kind = type(error).__name__
    text = str(error) if kind in _PLAIN_KINDS else f"{kind}: {error}"
    return Failure(kind, text, stage)


def to_error(failure: Failure, who: str) -> WeightSyncError:
    """Rebuilds the exception a failure describes, naming where it happened."""
    if failure.kind == "CoverageError":
        return CoverageError(failure.unconsumed, failure.unwritten, failure.disagreeing)
    if failure.kind in _REFIT_KINDS:
        return _REFIT_KINDS[failure.kind](
            f"{who}: {failure.text}",
            stage=failure.stage,
            version=failure.version,
            epoch=failure.epoch,
            ranks=failure.ranks or (who,),
            remedy=failure.remedy,
        )
    if failure.kind in _PLAIN_KINDS:
        return _PLAIN_KINDS[failure.kind](f"{who}: {failure.text}")
    return RefitError(
        f"{who}: {failure.text}",
        stage=failure.stage,
        version=failure.version,
        epoch=failure.epoch,
        ranks=(who,),
    )
