"""Which shards of a fleet take part: those that nobody excluded and no refit lost."""

from __future__ import annotations

from collections.abc import Iterable


class Presence:
    """Shards that are absent, and why.

    Shards that a refit lost are absent until the caller says anew who is excluded, or until they
    are replaced.
    """

    def __init__(self) -> None:
        self._excluded: frozenset[int] = frozenset()
        self._lost: frozenset[int] = frozenset()

    @property
    def absent(self) -> frozenset[int]:
        """All that do not take part."""
        return self._excluded | self._lost

    def exclude(self, shards: Iterable[int]) -> None:
        """Leaves exactly these out; what was lost before takes part again."""
        self._excluded, self._lost = frozenset(shards), frozenset()

    def lose(self, shards: Iterable[int]) -> None:
        """Notes shards that a refit lost."""
        self._lost |= frozenset(shards)

    def find_lost(self) -> None:
        """Lets everybody take part again who is not excluded."""
        self._lost = frozenset()

    def restore(self, shard: int) -> None:
        """A shard takes part again."""
        self._excluded -= {shard}
        self._lost -= {shard}
