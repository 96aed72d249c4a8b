"""Which shards serve, which take part in a refit, and which get the next request.

Keeps its own simple book, and follows the health monitor and the selector once they are attached.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from generation.errors import GenerationConfigError, NoHealthyShardsError
from generation.fleet import GenerationFleetHealth
from generation.selector import HealthyShardSelector
from weight_sync.membership import Membership

logger = logging.getLogger(__name__)


class Roster:
    """The fleet's shards by what may be asked of them; thread-safe.

    Args:
        shards: All shards.
    """

    def __init__(self, shards: Sequence[int]) -> None:
        self.shards = tuple(shards)
        self._lock = threading.Lock()
        self._dead: set[int] = set()
        self._stale: set[int] = set()
        self._turn = 0
        self._membership: Membership | None = None
        self.monitor: GenerationFleetHealth | None = None
        self.selector: HealthyShardSelector | None = None

    def attach(self, monitor: GenerationFleetHealth, selector: HealthyShardSelector) -> None:
        """Follows a monitor and a selector from now on.

        The monitor is told which shards are dead or stale already.

        Raises:
            GenerationConfigError: The monitor watches another number of shards.
        """
        if monitor.shard_count != len(self.shards):
            raise GenerationConfigError(
                "fleet health",
                [f"the monitor has {monitor.shard_count} shards, the fleet {len(self.shards)}"],
            )
        # Under the lock: what happens meanwhile is told after it, in its order.
        with self._lock:
            self.monitor, self.selector = monitor, selector
            for shard in self._stale:
                monitor.mark_weights_partial(shard)
            for shard in self._dead:
                monitor.record_actor_death(shard, "died before its health was watched")

    def set_membership(self, membership: Membership) -> None:
        """Limits refits to the shards of a membership."""
        self._membership = membership

    def alive(self) -> list[int]:
        """Returns the shards that answer calls, as far as is known."""
        absent = set(self.monitor.absent_shards()) if self.monitor else set()
        with self._lock:
            return [s for s in self.shards if s not in absent | self._dead]

    def serving(self) -> list[int]:
        """Returns the shards that may be handed requests."""
        serving = set(self.monitor.serving_shards()) if self.monitor else set(self.shards)
        with self._lock:
            return [s for s in self.shards if s in serving - self._dead - self._stale]

    def participants(self) -> list[int]:
        """Returns the shards that take part in refits."""
        members = self.shards if self._membership is None else self._membership.shards
        return [shard for shard in self.alive() if shard in members]

    def take(self) -> int:
        """Chooses the shard of the next request: the selector's, else each in turn.

        Raises:
            NoHealthyShardsError: No shard serves.
        """
        serving = self.serving()
        if self.selector is not None:
            return self.selector.acquire(serving)
        if not serving:
            raise NoHealthyShardsError(
                f"none of the shards {list(self.shards)} serves; restart one and refit it"
            )
        with self._lock:
            chosen = serving[self._turn % len(serving)]
            self._turn += 1
            return chosen

    def give_back(self, shard: int) -> None:
        """Ends a request that :meth:`take` chose a shard for."""
        if self.selector is not None:
            self.selector.release(shard)

    def died(self, shard: int, error: BaseException | str) -> None:
        """Takes conclusive evidence that a shard's process is gone."""
        with self._lock:
            self._dead.add(shard)
        if self.monitor is not None:
            self.monitor.record_actor_death(shard, str(error))

    def failed(self, shard: int, error: BaseException) -> None:
        """Takes one failed request."""
        if self.monitor is not None:
            self.monitor.report_failure(shard, error)

    def succeeded(self, shard: int) -> None:
        """Takes one successful request."""
        if self.monitor is not None:
            self.monitor.report_success(shard)

    def restarted(self, shard: int) -> None:
        """Takes a replacement engine: it lives, and serves after its first refit."""
        with self._lock:
            self._dead.discard(shard)
            self._stale.add(shard)

    def refitted(self, shard: int, version: int) -> None:
        """Takes a complete, verified refit of a shard."""
        with self._lock:
            self._stale.discard(shard)
        if self.monitor is not None:
            self.monitor.report_refit(shard, weight_version=version)

    def torn(self, shard: int) -> None:
        """Takes a refit that left a shard with weights nobody vouches for."""
        logger.warning("shard %d is stale until its next complete refit", shard)
        with self._lock:
            self._stale.add(shard)
        if self.monitor is not None:
            self.monitor.mark_weights_partial(shard)
