"""Waits for several Ray calls at once; every outcome is kept and none can block the others.

``ray.get`` of a list raises on the first dead actor and forgets the rest. Here each participant's
answer is a value or an error of its own, and nobody is waited for beyond one shared deadline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import EngineStateError, PeerDeadError, WeightSyncError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Answer(Generic[T]):
    """What one participant answered.

    Attributes:
        value: Its result, when ``error`` is None.
        error: Why there is no result.
        dead: Whether the participant's process is gone for certain.
    """

    value: T | None = None
    error: WeightSyncError | None = None
    dead: bool = False

    @property
    def yes(self) -> bool:
        """True only for the explicit answer True; None and errors are not success."""
        return self.error is None and self.value is True


def translate(error: BaseException, who: str, what: str) -> tuple[WeightSyncError, bool]:
    """Turns what Ray raised into an error of this library, and tells whether ``who`` is dead."""
    if isinstance(error, RayActorError):
        dead = PeerDeadError(
            f"{who} died: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            stage=what,
            ranks=[who],
            remedy="restart the shard, then refit it",
        )
        return dead, True
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, WeightSyncError):
            return cause, False
        # vLLM says so when its engine process is gone although the actor in front of it lives.
        gone = type(cause).__name__ == "EngineDeadError"
        text = f"{who} failed in {what}: {type(cause).__name__}: {cause}"
        if gone:
            remedy = "restart the shard, then refit it"
            return PeerDeadError(text, stage=what, ranks=[who], remedy=remedy), True
        return EngineStateError(text), False
    if isinstance(error, GetTimeoutError):
        return EngineStateError(f"{who} did not answer {what} in time; probe it"), False
    return EngineStateError(f"{who} failed in {what}: {type(error).__name__}: {error}"), False


def gather(
    refs: Mapping[int, ray.ObjectRef], what: str, timeout_s: float
) -> dict[int, Answer[Any]]:
    """Waits for one call per shard.

    Args:
        refs: Shard number to the call's reference.
        what: Name of the call, for errors.
        timeout_s: Seconds for all of them together.

    Returns:
        An answer for every shard; never raises for what a shard did.
    """
    deadline = Deadline(timeout_s)
    pending = list(refs.values())
    while pending and not deadline.expired:
        _, pending = ray.wait(pending, num_returns=1, timeout=deadline.remaining())
    late = set(pending)
    answers: dict[int, Answer[Any]] = {}
    for shard, ref in refs.items():
        who = f"shard {shard}"
        if ref in late:
            error = EngineStateError(
                f"{who} did not answer {what} within {timeout_s:g} s; probe it, restart it when it "
                "is wedged"
            )
            answers[shard] = Answer(error=error)
            continue
        try:
            answers[shard] = Answer(value=ray.get(ref, timeout=timeout_s))
        except RayError as problem:
            translated, dead = translate(problem, who, what)
            translated.__cause__ = problem
            answers[shard] = Answer(error=translated, dead=dead)
    return answers


def values_or_raise(answers: Mapping[int, Answer[Any]]) -> dict[int, Any]:
    """Returns all values.

    Raises:
        WeightSyncError: The first shard's error, with the others as notes.
    """
    wrong = [(shard, a.error) for shard, a in sorted(answers.items()) if a.error is not None]
    if wrong:
        first = wrong[0][1]
        for shard, other in wrong[1:]:
            first.add_note(f"shard {shard}: {other}")
        raise first
    return {shard: answer.value for shard, answer in answers.items()}
