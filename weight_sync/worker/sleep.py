"""Whether an engine's weights are in memory, as the worker that holds them knows."""

from __future__ import annotations

from typing import Protocol

from weight_sync.errors import EngineStateError
from weight_sync.recording import Recording

WEIGHTS = "weights"


class SleepState(Protocol):
    """What an engine that can free its memory tells the worker's agent."""

    @property
    def asleep(self) -> frozenset[str]:
        """Kinds of memory that are freed now, e.g. ``{"weights", "kv_cache"}``."""
        ...

    @property
    def discarded(self) -> bool:
        """Whether weights lost their values since the last full refit."""
        ...

    def recorded(self, recording: Recording) -> None:
        """Learns what refits write; everything else must survive a sleep by other means.

        Raises:
            EngineStateError: If a discarded parameter is not among it.
        """
        ...

    def installed(self) -> None:
        """A refit gave every trained weight its value."""
        ...


class AlwaysAwake:
    """The state of an engine that cannot free its memory."""

    asleep: frozenset[str] = frozenset()
    discarded = False

    def recorded(self, recording: Recording) -> None:
        """Nothing can be lost."""

    def installed(self) -> None:
        """Nothing was lost."""


def require_weights(state: SleepState) -> None:
    """Refuses to touch weights that are asleep.

    Raises:
        EngineStateError: Nothing was changed.
    """
    if WEIGHTS in state.asleep:
        raise EngineStateError(
            "the engine's weights are asleep; nothing was changed. Wake them first, e.g. with "
            'wake_up(tags=["weights"]), then refit'
        )
