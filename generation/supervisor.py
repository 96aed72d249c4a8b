"""Restarts dead shards in the background, one thread per shard, never blocking the controller."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

from generation.fleet import GenerationFleetHealth, ShardState

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Restart:
    thread: threading.Thread
    started_at: float


class EngineSupervisor:
    """Turns DEAD shards into STALE ones, which the next refit brings back into service.

    Args:
        monitor: Health of the fleet; every outcome is recorded there.
        restart: Blocking and slow: replaces the engine of one shard and returns its new address, or
            None when it serves no HTTP.
        restart_timeout_s: A restart that takes longer retires its shard. It is not tried again: the
            first attempt may still hold the devices.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        monitor: GenerationFleetHealth,
        restart: Callable[[int], str | None],
        restart_timeout_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monitor = monitor
        self._restart = restart
        self._restart_timeout_s = restart_timeout_s
        self._clock = clock
        self._running: dict[int, _Restart] = {}
        self._draining = False

    def tick(self) -> list[int]:
        """Starts a restart of every DEAD shard and ends those overdue; returns at once.

        Returns:
            The shards whose restart started now.
        """
        self._forget_finished()
        self._retire_overdue()
        if self._draining:
            return []
        dead = [s.shard for s in self._monitor.snapshot() if s.state is ShardState.DEAD]
        return [shard for shard in dead if self._start(shard)]

    def drain(self, timeout_s: float) -> list[int]:
        """Starts no more restarts and waits for the running ones, at most ``timeout_s`` seconds.

        Returns:
            The shards whose restart is still running; their threads do not outlive the process.
        """
        self._draining = True
        deadline = time.monotonic() + timeout_s
        for restart in list(self._running.values()):
            restart.thread.join(max(deadline - time.monotonic(), 0.0))
        self._forget_finished()
        return sorted(self._running)

    def _start(self, shard: int) -> bool:
        if not self._monitor.mark_restarting(shard):
            return False
        thread = threading.Thread(
            target=self._run, args=(shard,), name=f"restart-shard-{shard}", daemon=True
        )
        self._running[shard] = _Restart(thread, self._clock())
        thread.start()
        return True

    def _run(self, shard: int) -> None:
        try:
            base_url = self._restart(shard)
        except BaseException as error:  # a restart may raise anything, and all of it is a failure
            logger.exception("restart of shard %d failed", shard)
            self._monitor.mark_restart_failed(shard, f"{type(error).__name__}: {error}")
        else:
            self._monitor.mark_loaded(shard, base_url)

    def _forget_finished(self) -> None:
        self._running = {s: r for s, r in self._running.items() if r.thread.is_alive()}

    def _retire_overdue(self) -> None:
        for shard, restart in self._running.items():
            overdue = self._clock() - restart.started_at > self._restart_timeout_s
            if overdue and self._monitor.state_of(shard) is ShardState.RESTARTING:
                self._monitor.retire(
                    shard, f"restart did not end within {self._restart_timeout_s} s"
                )
