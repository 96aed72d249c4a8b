"""The router's backends: who is in rotation, who is busy, and how their requests came out."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from generation.errors import GenerationConfigError


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """How the requests of one backend came out, in the order in which they ended.

    Attributes:
        succeeded: Whether one succeeded; it ended every streak of failures before it.
        failures: Failures in a row after the last success, or since the last look without one.
    """

    succeeded: bool = False
    failures: int = 0


class BackendPool:
    """Backends by base address; thread-safe.

    Args:
        health_managed: Whether someone watches health and pushes the full set of good backends
            again and again. Only then does a failing one leave the rotation at once: nobody else
            would bring it back.
    """

    def __init__(self, *, health_managed: bool) -> None:
        self._health_managed = health_managed
        self._lock = threading.Lock()
        self._rotation: list[str] = []
        self._outstanding: Counter[str] = Counter()
        self._outcomes: dict[str, Outcomes] = {}

    def replace(self, base_urls: Iterable[str]) -> None:
        """Makes exactly these backends, known before or not, the rotation.

        Requests in flight on a backend that left go on. Their count is kept, so that a backend that
        comes back is not overloaded.

        Raises:
            GenerationConfigError: Addresses that are not absolute http or https ones.
        """
        urls = [url.rstrip("/") for url in base_urls]
        wrong = [f"{url!r} is not an http(s) address" for url in urls if not _is_http(url)]
        if wrong:
            raise GenerationConfigError("router backends", wrong)
        with self._lock:
            self._rotation = list(dict.fromkeys(urls))

    def rotation(self) -> list[str]:
        """Returns the backends that take requests now."""
        with self._lock:
            return list(self._rotation)

    def acquire(self, excluding: Collection[str] = ()) -> str | None:
        """Chooses the backend with the fewest requests in flight, the first among equals.

        Returns:
            Its address, counted as busy; None when nothing (but ``excluding``) is in rotation.
        """
        with self._lock:
            free = [url for url in self._rotation if url not in excluding]
            if not free:
                return None
            chosen = min(free, key=lambda url: self._outstanding[url])
            self._outstanding[chosen] += 1
            return chosen

    def release(self, base_url: str) -> None:
        """Ends one request of a backend."""
        with self._lock:
            self._outstanding[base_url] -= 1
            if self._outstanding[base_url] <= 0:
                del self._outstanding[base_url]

    def record_success(self, base_url: str) -> None:
        """Counts one request that the backend answered whole; the failures before it are over."""
        with self._lock:
            self._outcomes[base_url] = Outcomes(succeeded=True)

    def record_failure(self, base_url: str, *, unreachable: bool) -> None:
        """Counts one failure.

        Args:
            base_url: The backend.
            unreachable: It gave no complete answer, as opposed to answering with an error status.
        """
        with self._lock:
            before = self._outcomes.get(base_url, Outcomes())
            self._outcomes[base_url] = dataclasses.replace(before, failures=before.failures + 1)
            if unreachable and self._health_managed and base_url in self._rotation:
                self._rotation.remove(base_url)

    def drain_outcomes(self) -> dict[str, Outcomes]:
        """Returns how requests came out per backend since the last call."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, {}
            return outcomes


def _is_http(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.netloc)
