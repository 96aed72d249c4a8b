"""Tells a frozen participant from a slow one: whoever runs at all says so at a steady pace.

A process that was killed closes its connections; one that was stopped, or that hangs with Python's
lock held, keeps them open and only falls silent.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

_logger = logging.getLogger(__name__)


class HeartbeatBoard:
    """When each participant was last heard of, on the clock of whoever keeps the board.

    Args:
        names: Participants that must be heard of.
        now: Current time in seconds; a participant never heard of counts as silent since then.
    """

    def __init__(self, names: Iterable[str], now: float) -> None:
        self._heard = dict.fromkeys(names, now)
        self._counts: dict[str, int] = {}

    def record(self, name: str, count: int, now: float) -> None:
        """Notes beat number ``count`` of ``name``; an old number read again is not a new beat."""
        if name in self._heard and count > self._counts.get(name, -1):
            self._counts[name] = count
            self._heard[name] = now

    def silent(self, now: float, limit: float) -> list[str]:
        """Participants not heard of for more than ``limit`` seconds, in name order."""
        return sorted(name for name, heard in self._heard.items() if now - heard > limit)


class HeartbeatPublisher:
    """Calls ``publish(count)`` every ``interval`` seconds from a small thread until closed.

    A beat that cannot be published is logged once and tried again: to the reader of the board its
    sender is silent, which is what the board is for.

    Args:
        publish: Delivers beat number ``count``, starting at 0; must not block for long.
        interval: Seconds between beats.
    """

    def __init__(self, publish: Callable[[int], None], interval: float = 0.5) -> None:
        self._publish = publish
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; may be called again."""
        self._stop.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        count = 0
        failed = False
        while not self._stop.is_set():
            try:
                self._publish(count)
                failed = False
            except Exception as error:
                if not failed:
                    _logger.warning("a heartbeat could not be published: %s", error)
                failed = True
            count += 1
            self._stop.wait(self._interval)
