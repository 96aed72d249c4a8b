"""Chooses the shard of the next request: the serving one with the fewest requests in flight."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection

from generation.errors import NoHealthyShardsError
from generation.fleet import GenerationFleetHealth


class HealthyShardSelector:
    """Least outstanding requests; a slow shard is steered around before anyone diagnoses it.

    Args:
        monitor: Says which shards serve.
    """

    def __init__(self, monitor: GenerationFleetHealth) -> None:
        self._monitor = monitor
        self._lock = threading.Lock()
        self._outstanding: Counter[int] = Counter()

    def acquire(self, among: Collection[int] | None = None) -> int:
        """Chooses a shard (the lowest index among equals) and counts one request on it.

        Args:
            among: The shards to choose from; None for all.

        Raises:
            NoHealthyShardsError: None of them serves.
        """
        with self._lock:
            serving = self._monitor.serving_shards()
            if among is not None:
                serving = [shard for shard in serving if shard in among]
            if not serving:
                states = {s.shard: str(s.state) for s in self._monitor.snapshot()}
                raise NoHealthyShardsError(
                    f"no shard can be handed a request ({states}); retry after the restart or "
                    "refit that is due"
                )
            shard = min(serving, key=lambda index: (self._outstanding[index], index))
            self._outstanding[shard] += 1
            return shard

    def release(self, shard: int) -> None:
        """Ends one request of a shard; the count never goes below zero."""
        with self._lock:
            self._outstanding[shard] = max(self._outstanding[shard] - 1, 0)

    def outstanding(self, shard: int) -> int:
        """Returns the number of requests in flight on a shard."""
        with self._lock:
            return self._outstanding[shard]
