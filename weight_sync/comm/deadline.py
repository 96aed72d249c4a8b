"""A point in time after which a wait ends in a named error; every wait takes one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from weight_sync.errors import ConfigError, DeadlineError

#: How much earlier than the asking side the asked one gives up: seconds, and part at most.
_MARGIN_SECONDS = 2.0
_MARGIN_FRACTION = 0.2


class Deadline:
    """A fixed end for one piece of work, shared by all the waits inside it.

    Args:
        seconds: How long the work may take from now, in seconds; finite and not negative.
        clock: Monotonic clock in seconds.

    Raises:
        ConfigError: ``seconds`` is negative, infinite or not a number.
    """

    __slots__ = ("_clock", "_end", "seconds")

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not math.isfinite(seconds) or seconds < 0:
            raise ConfigError(
                f"a deadline of {seconds} seconds would never end or already has; "
                "give a finite number of seconds that is not negative"
            )
        self.seconds = float(seconds)
        self._clock = clock
        self._end = clock() + seconds

    def remaining(self) -> float:
        """Seconds that are left, never below zero."""
        return max(0.0, self._end - self._clock())

    @property
    def expired(self) -> bool:
        """Whether the end has passed."""
        return self._clock() >= self._end

    def end(self) -> None:
        """Ends it now, from any thread: what is waited for will not come."""
        self._end = min(self._end, self._clock())

    def inner(self) -> float:
        """Seconds that whoever is asked gets, a little less than is left here.

        Whoever was asked then gives up first, and the reason it gives arrives in time.
        """
        left = self.remaining()
        return left - min(_MARGIN_SECONDS, _MARGIN_FRACTION * left)

    def sooner(self, seconds: float) -> Deadline:
        """A deadline on the same clock that ends here or after ``seconds``, whichever is first."""
        return Deadline(min(self.remaining(), seconds), self._clock)

    def native(self) -> timedelta:
        """What is left as a timeout for native calls, which read zero as "no limit"."""
        return timedelta(seconds=max(self.remaining(), 0.001))

    def check(
        self,
        stage: str,
        *,
        version: int | None = None,
        epoch: int | None = None,
        ranks: Iterable[str] = (),
    ) -> None:
        """Raises :class:`DeadlineError` naming stage, version, epoch and ranks if expired."""
        if self.expired:
            raise DeadlineError(
                f"the deadline of {self.seconds:g} s passed",
                stage=stage,
                version=version,
                epoch=epoch,
                ranks=ranks,
            )

    def __repr__(self) -> str:
        return f"Deadline(seconds={self.seconds:g}, remaining={self.remaining():.3f})"
