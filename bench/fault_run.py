"""Runs one cell: a good fleet, one fault in one refit, what came of it, and the next good refit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field

import weight_sync.errors
from bench.fault_cells import Cell
from bench.fault_fleet import DEADLINE_S, AbsentError, Fleet, HealError
from bench.fault_injection import Fault, InjectedError
from tests.harness.processes import Child, ChildError, ChildGoneError

# How much longer than the deadline an answer is waited for before the cell counts as hanging.
_GRACE_S = 4.0
# How long trainer ranks wait for the end of a refit whose orchestrator is gone.
_WAIT_S = 3.0
# Names of errors that a caller can expect; anything else is a crash.
_NAMED = {
    name
    for name, value in vars(weight_sync.errors).items()
    if isinstance(value, type) and issubclass(value, Exception)
} | {InjectedError.__name__}


@dataclass
class Result:
    """What came of a cell.

    Attributes:
        transport: As in the cell.
        who: As in the cell.
        fault: As in the cell.
        stage: As in the cell.
        offset: Bytes of the victim's own part after which it failed, in transfers.
        outcome: ``recovered``, ``named_error``, or what must not be: ``crash`` or ``hang``.
        seconds: From the call to its outcome.
        deadline_s: By when there must be one.
        consistent: Whether every serving shard is bit-equal to the version it reports, once
            everything that could still run has ended.
        leaks: How much survivors hold that they did not hold before.
        healed: Whether the next refit, with replacements of the dead, succeeded.
        next_refit_s: How long it took, with the rebuild.
        lost_again: Whether that refit lost a shard, which was taken in again and refitted.
        error: The error, shortened.
        leaked: What leaked.
    """

    transport: str
    who: str
    fault: str
    stage: str
    offset: int
    outcome: str
    seconds: float
    deadline_s: float
    consistent: bool = False
    leaks: int = 0
    healed: bool = False
    next_refit_s: float | None = None
    lost_again: bool = False
    error: str = ""
    leaked: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether the cell ended as every cell must."""
        return (
            self.outcome in ("recovered", "named_error")
            and self.seconds <= self.deadline_s
            and self.consistent
            and self.healed
            and not self.leaks
        )

    def as_json(self) -> dict[str, object]:
        """For the JSON report."""
        return asdict(self)


def run_cell(fleet: Fleet, cell: Cell, bytes_by_process: dict[str, int]) -> Result:
    """Runs one cell on a fleet that just did a good refit.

    Args:
        fleet: Healed afterwards, unless the result says otherwise.
        cell: What fails.
        bytes_by_process: Bytes each process launches in a transfer, to place offsets.
    """
    victim, hook = fleet.victim(cell.who), fleet.trigger
    before = fleet.census()
    if cell.rebuilds:
        fleet.rebuild()
    if cell.own_hook:
        hook = victim
    name = next(n for n, child in fleet.processes().items() if child is hook)
    offset = int(cell.part * bytes_by_process.get(name, 0)) if cell.stage == "transfer" else 0
    version = fleet.publish()
    target = 0 if hook is victim else victim.pid
    if target:
        victim.ask("expect", cell.fault, cell.who == "orchestrator")
    hook.ask("arm", Fault(cell.fault, cell.hook, offset, target))
    outcome, seconds, error = _refit(fleet, cell, version)
    result = Result(
        cell.transport,
        cell.who,
        cell.fault,
        cell.stage,
        offset,
        outcome,
        round(seconds, 3),
        DEADLINE_S,
        error=error,
    )
    zombie = victim if cell.who == "orchestrator" and cell.fault == "stop" else None
    _heal(fleet, result, victim, zombie)
    if result.healed:
        result.leaked = fleet.leaks(before)
        result.leaks = len(result.leaked)
    return result


def _refit(fleet: Fleet, cell: Cell, version: int) -> tuple[str, float, str]:
    """The refit in which the fault happens: its outcome, seconds and error."""
    start = time.monotonic()
    fleet.orchestrator.send("sync", version)
    if cell.who == "orchestrator" and cell.fault in ("kill", "stop"):
        # Nobody is left to ask but the trainer ranks, which wait for the end of the refit.
        waits = [_waiter(t, version) for t in fleet.trainers]
        with ThreadPoolExecutor(len(waits)) as pool:
            outcomes = [done.result() for done in [pool.submit(wait) for wait in waits]]
        outcome, error = max(outcomes, key=lambda found: found[0] != "recovered")
        return outcome, time.monotonic() - start, error
    outcome, error = _outcome(lambda: fleet.orchestrator.receive(DEADLINE_S + _GRACE_S))
    return outcome, time.monotonic() - start, error


def _waiter(trainer: Child, version: int) -> Callable[[], tuple[str, str]]:
    seconds = DEADLINE_S + _GRACE_S
    return lambda: _outcome(lambda: trainer.ask("wait", version, _WAIT_S, seconds=seconds))


def _outcome(wait: Callable[[], object]) -> tuple[str, str]:
    try:
        wait()
    except ChildError as error:
        text = str(error).splitlines()[0]
        return ("named_error" if error.kind in _NAMED else "crash"), text
    except ChildGoneError as error:
        return "crash", str(error)
    except TimeoutError as error:
        return "hang", str(error)
    return "recovered", ""


def _heal(fleet: Fleet, result: Result, victim: Child, zombie: Child | None) -> None:
    """Checks what serves, replaces the dead, refits everybody and checks again."""
    try:
        if zombie is None:
            fleet.thaw(victim)
        for child in _living(fleet, zombie):
            child.ask("disarm")
        result.consistent = fleet.consistent()
        if zombie is not None:
            fleet.take_over()
        fleet.heal()
        try:
            result.next_refit_s = round(fleet.refit(), 3)
        except AbsentError:
            # Whoever drives a fleet takes a shard in again that was lost.
            result.lost_again = True
            fleet.heal()
            result.next_refit_s = round(fleet.refit(), 3)
        if zombie is not None:
            # It goes on where it was stopped, while another one drives the fleet.
            fleet.thaw(zombie)
            _outcome(lambda: zombie.receive(DEADLINE_S + _GRACE_S))
            result.consistent &= fleet.consistent()
            zombie.close()
            fleet.refit()
        result.healed = True
    except (HealError, ChildError, ChildGoneError, TimeoutError) as error:
        result.leaked = [f"not healed: {str(error).splitlines()[0]}"]


def _living(fleet: Fleet, but: Child | None) -> Sequence[Child]:
    return [c for c in fleet.processes().values() if c.process.is_alive() and c is not but]
