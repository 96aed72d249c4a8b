"""Drops what engines computed with earlier weights, beside the commit where an engine allows it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import wait
from functools import partial

from weight_sync.comm.deadline import Deadline
from weight_sync.engine import CachesApart, EngineShard
from weight_sync.errors import DeadlineError
from weight_sync.threads import beside

# Commits begin so long before caches are dropped beside them: until its first bytes travel, a
# worker in this process needs Python's lock as much as its scheduler does.
_HEAD_START_SECONDS = 0.002
# How long an engine may still take for it after a refit's time is up.
_CLOSE_SECONDS = 2.0


class Caches:
    """The caches of all shards of one refit.

    Shards are paused, so nothing gets into a cache after it was dropped, even before the commit
    ends. A shard whose commit fails stays paused; the refit that brings it back drops its caches
    again.

    Args:
        shards: Paused shards, whose commits begin now.
        deadline: Of the refit.
    """

    def __init__(self, shards: Sequence[EngineShard], deadline: Deadline) -> None:
        self._deadline = deadline
        self._ended = threading.Event()
        self._dropping = {
            id(shard): beside("weight-sync-invalidate", partial(self._drop_soon, shard))
            for shard in shards
            if isinstance(shard, CachesApart) and shard.caches_apart
        }

    def _drop_soon(self, shard: EngineShard) -> None:
        self._ended.wait(_HEAD_START_SECONDS)
        shard.invalidate()

    def commits_ended(self) -> None:
        """Nothing is left that needs a head start."""
        self._ended.set()

    def drop(self, shard: EngineShard, deadline: Deadline) -> None:
        """Returns once the caches of a shard are dropped.

        Raises:
            CacheInvalidationError: If the engine refused.
            DeadlineError: If it did not answer.
        """
        dropping = self._dropping.get(id(shard))
        if dropping is None:
            shard.invalidate()
            return
        if not wait([dropping], deadline.remaining()).done:
            raise DeadlineError("the engine did not drop its caches in time", stage="invalidate")
        del self._dropping[id(shard)]
        try:
            dropping.result()
        finally:
            # Or its error, this frame and the shard keep each other.
            del dropping

    def close(self) -> None:
        """Returns once no caches are being dropped, or time is up.

        Also those of shards whose commit failed: whoever hears of that may use the engine at once.
        """
        self._ended.set()
        if self._dropping:
            wait(self._dropping.values(), max(self._deadline.remaining(), _CLOSE_SECONDS))
