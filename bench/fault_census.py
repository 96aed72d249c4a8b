"""Counts what a process holds, so that what a failed refit left behind shows."""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weight_sync.threads import IDLE

# Pools start threads as they need them, up to a bound; the first of each stands for the pool.
_FIRST = "_0"
# So do the sockets through which pool threads hand over replies, one event descriptor each.
_EVENTS = "anon_inode:[eventfd]"


@dataclass(frozen=True)
class Census:
    """What one process holds.

    Attributes:
        descriptors: What open file descriptors are, without numbers, but for event descriptors.
        threads: Names of its Python threads, one per pool; those that are kept idle for the next
            call do not count, those of calls that are stuck do.
        shared: Distinct shared-memory files it maps.
    """

    descriptors: tuple[str, ...]
    threads: tuple[str, ...]
    shared: int

    def beyond(self, before: Census) -> list[str]:
        """What is held now and was not before."""
        found = []
        if len(self.descriptors) > len(before.descriptors):
            more = Counter(self.descriptors) - Counter(before.descriptors)
            listed = ", ".join(f"{count} x {kind}" for kind, count in sorted(more.items()))
            counts = f"{len(before.descriptors)} -> {len(self.descriptors)}"
            found.append(f"descriptors {counts}: {listed}")
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
    # A rendezvous is named after its port, which every epoch has anew.
    names = [re.sub(r"rendezvous-\d+", "rendezvous", t.name) for t in threading.enumerate()]
    busy = [name for name in names if name != IDLE]
    threads = sorted(n for n in busy if n.endswith(_FIRST) or not re.search(r"_\d+$", n))
    return Census(_descriptors(), tuple(threads), len(mapped))


def _descriptors() -> tuple[str, ...]:
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # The listing itself was one.
            kinds.append(re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{name}")))
    return tuple(sorted(kind for kind in kinds if kind != _EVENTS))


def socket_directories(root: str, living: set[int]) -> list[str]:
    """Private socket directories of processes that are gone, by name.

    Args:
        root: Parent of the directories.
        living: Process ids that may have some.
    """
    return sorted(name for name in os.listdir(root) if int(name.split("-")[2], 16) not in living)
