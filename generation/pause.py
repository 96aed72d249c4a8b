"""Who asked an engine to stand still: it goes on only when nobody does any more.

A trainer that paused by hand, a refit and sleep each have their own reason to hold an engine. A
flag would let the first one that ends its pause start the engine under the others.
"""

from __future__ import annotations

from weight_sync.errors import EngineStateError

USER = "user"
REFIT = "refit"
SLEEP = "sleep"


class PauseOwners:
    """Reasons to stand still, each at most once."""

    def __init__(self) -> None:
        self._held: set[str] = set()

    @property
    def any(self) -> bool:
        """Whether someone holds the engine."""
        return bool(self._held)

    def holds(self, owner: str) -> bool:
        """Whether this reason holds."""
        return owner in self._held

    def add(self, owner: str) -> None:
        """Holds the engine; idempotent."""
        self._held.add(owner)

    def remove(self, owner: str) -> bool:
        """Ends one reason; idempotent. Returns whether the engine may go on."""
        self._held.discard(owner)
        return not self._held

    def check_wake(self) -> None:
        """Raises EngineStateError when waking would run weights that a failed refit left mixed."""
        if REFIT in self._held:
            raise EngineStateError(
                "the last refit of this shard did not finish, its weights may be mixed; refit it "
                "before waking its KV cache"
            )
