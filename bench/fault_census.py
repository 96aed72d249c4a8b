"""Counts what a process holds, so that what a failed refit left behind shows."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path

# Threads of a server come with the first requests and stay; their number is bounded.
_POOLED = ("weight-sync-serve", "ThreadPoolExecutor")


@dataclass(frozen=True)
class Census:
    """What one process holds.

    Attributes:
        descriptors: Open file descriptors.
        threads: Names of its Python threads, without those of bounded pools.
        shared: Distinct shared-memory files it maps.
    """

    descriptors: int
    threads: tuple[str, ...]
    shared: int

    def beyond(self, before: Census) -> list[str]:
        """What is held now and was not before."""
        found = []
        if self.descriptors > before.descriptors:
            found.append(f"descriptors {before.descriptors} -> {self.descriptors}")
        extra = list(self.threads)
        for name in before.threads:
            if name in extra:
                extra.remove(name)
        found += [f"thread {name}" for name in extra]
        if self.shared > before.shared:
            found.append(f"shared memory {before.shared} -> {self.shared}")
        return found


def census() -> Census:
    """Counts this process."""
    mapped = set()
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and ("/dev/shm/" in fields[5] or "/torch_" in fields[5]):
            mapped.add(fields[4])
    threads = sorted(t.name for t in threading.enumerate() if not t.name.startswith(_POOLED))
    return Census(len(os.listdir("/proc/self/fd")), tuple(threads), len(mapped))


def socket_directories(root: str, living: set[int]) -> list[str]:
    """Private socket directories of processes that are gone, by name.

    Args:
        root: Parent of the directories.
        living: Process ids that may have some.
    """
    return sorted(name for name in os.listdir(root) if int(name.split("-")[2], 16) not in living)
