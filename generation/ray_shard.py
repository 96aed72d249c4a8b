"""One shard of the fleet as the weight synchronizer sees it."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayError

from generation.answers import translate
from generation.pause import REFIT
from generation.worker_pool import WorkerPool
from weight_sync.errors import CacheInvalidationError, EngineStateError


class RayShard:
    """Calls the leader's actor; a restarted shard is reached through the same object.

    Args:
        pool: The fleet's actors.
        shard: Number of the shard.
        timeout_s: Longest time of one call; the synchronizer's own deadline is usually shorter.
    """

    def __init__(self, pool: WorkerPool, shard: int, timeout_s: float) -> None:
        self._pool = pool
        self._shard = shard
        self._timeout_s = timeout_s
        self.workers = pool.shard_width

    def call(self, request: bytes) -> list[bytes]:
        """Runs one request on every worker; replies in rank order."""
        replies: list[bytes] = self._get("weight_sync_call", request)
        return replies

    def pause(self) -> None:
        """Stops scheduling, keeps requests in flight and drops their caches.

        Raises:
            EngineStateError: The engine did not confirm.
        """
        if self._get("pause", REFIT, True) is not True:
            raise EngineStateError(f"shard {self._shard} did not confirm that it is paused")

    def invalidate(self) -> None:
        """Drops every cache computed with earlier weights.

        Raises:
            CacheInvalidationError: The engine refused.
        """
        if self._get("invalidate") is not True:
            raise CacheInvalidationError(
                f"shard {self._shard} refused to drop its caches; check that its KV connector can "
                "reset, and that nothing runs on it but through this facade"
            )

    def resume(self) -> None:
        """Ends the refit's pause; the engine stays paused when someone else holds it."""
        self._get("resume", REFIT)

    def set_version(self, version: int) -> None:
        """Stamps outputs generated from now on.

        Raises:
            EngineStateError: The engine did not confirm.
        """
        if self._get("set_version", version) is not True:
            raise EngineStateError(f"shard {self._shard} did not confirm version {version}")

    def _get(self, method: str, *args: object) -> Any:  # noqa: ANN401 - the method's result
        ref = getattr(self._pool.leader(self._shard), method).remote(*args)
        try:
            return ray.get(ref, timeout=self._timeout_s)
        except RayError as error:
            translated, _ = translate(error, f"shard {self._shard}", method)
            raise translated from error
