"""Many rebuilds in a row, every other one after an aborted refit: nothing may pile up."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from bench.fault_fleet import Fleet
from bench.fault_injection import Fault
from tests.harness.processes import ChildError

COUNT = 20
# Caches and allocators fill up first.
_WARM = 6


@dataclass(frozen=True)
class Rebuilds:
    """What rebuilds left behind.

    Attributes:
        transport: Name of the transport.
        rebuilds: How many.
        failed_refits: After how many of them a refit was aborted.
        leaked: Descriptors, threads, shared memory and socket directories beyond the first count.
        resident_growth_kib: Growth of the resident memory of the process that grew most.
        resident_kib: Its resident memory at the end.
    """

    transport: str
    rebuilds: int
    failed_refits: int
    leaked: list[str]
    resident_growth_kib: int
    resident_kib: int

    def as_json(self) -> dict[str, object]:
        """For the JSON report."""
        return asdict(self)


def run_rebuilds(fleet: Fleet, count: int = COUNT) -> Rebuilds:
    """Rebuilds a fleet that just did a good refit.

    Raises:
        HealError: If a refit after a rebuild fails.
    """
    _rebuild(fleet, _WARM)
    before, resident = fleet.census(), _resident(fleet)
    failed = _rebuild(fleet, count)
    leaked = fleet.leaks(before)
    after = _resident(fleet)
    growth = {pid: after[pid] - resident[pid] for pid in resident}
    most = max(growth, key=lambda pid: growth[pid])
    return Rebuilds(fleet.transport, count, failed, leaked, growth[most], after[most])


def _rebuild(fleet: Fleet, count: int) -> int:
    failed = 0
    for number in range(count):
        if number % 2:
            fleet.victim("worker").ask("arm", Fault("raise", "transfer"))
            failed += _fails(fleet)
        else:
            fleet.rebuild()
        fleet.refit()
    return failed


def _fails(fleet: Fleet) -> bool:
    version = fleet.publish()
    try:
        fleet.orchestrator.ask("sync", version)
    except ChildError:
        return True
    return False


def _resident(fleet: Fleet) -> dict[int, int]:
    """Resident KiB of every process."""
    resident = {}
    for child in fleet.processes().values():
        status = Path(f"/proc/{child.pid}/status").read_text()
        line = next(text for text in status.splitlines() if text.startswith("VmRSS:"))
        resident[child.pid] = int(line.split()[1])
    return resident
