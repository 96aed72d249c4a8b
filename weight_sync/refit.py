"""One refit, from paused engines to resumed ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from weight_sync.caches import Caches
from weight_sync.comm.deadline import Deadline
from weight_sync.engine import EngineShard
from weight_sync.errors import AbortedError, DeadlineError, StaleEpochError, WeightSyncError
from weight_sync.messages import Commit, Committed, Status, WorkerState
from weight_sync.participants import Shards, raise_shards
from weight_sync.plan import Plan
from weight_sync.report import RefitReport
from weight_sync.threads import beside

# Stages that happen inside a worker's commit and are reported by it.
_WORKER_STAGES = ("transfer", "commit", "process", "verify")

# After a step that took longer than this, whoever drives the fleet asks whether that is still so.
SURE_SECONDS = 0.25
# How long resuming engines may take at least, when time is up because of others.
_RESUME_SECONDS = 2.0


@dataclass(frozen=True)
class Outcome:
    """What became of each shard.

    Attributes:
        committed: Replies of shards whose every worker committed.
        errors: Why others did not; they may hold mixed weights.
        seconds: Seconds per stage.
        pause_seconds: From the first pause to the last resume.
    """

    committed: dict[int, list[Committed]]
    errors: dict[int, WeightSyncError]
    seconds: dict[str, float]
    pause_seconds: float


def commit_version(
    shards: Shards,
    plan: Plan,
    version: int,
    *,
    verify: bool,
    deadline: Deadline,
    generations: tuple[int, ...],
    first_byte: Callable[[], None],
    stage: Callable[[str], None],
    feed: Callable[[Deadline], None] | None = None,
    stale: Collection[int] = (),
) -> Outcome:
    """Pauses, installs, invalidates caches and resumes.

    Shards that did not commit stay paused: they may hold mixed weights and must not serve.

    Args:
        shards: The fleet.
        plan: The current plan.
        version: Version to install.
        verify: Whether workers compare digests.
        deadline: By when all of it must be done.
        generations: Export generation of every trainer rank, in rank order.
        first_byte: Called right before live weights may change.
        stage: Told which stage begins.
        feed: Makes trainer ranks send what was not staged; runs while workers install.
        stale: Shards that may hold mixed weights already; they are never resumed uncommitted.

    Raises:
        WeightSyncError: If pausing failed (undone, nothing changed) or a committed shard could not
            drop its caches or resume.
    """
    membership = plan.membership
    present = list(membership.shards)
    epoch = membership.epoch
    spent: dict[str, float] = {}

    stage("pause")
    begin = time.perf_counter()
    pause = _Pause()
    _, failed = shards.apply(present, pause, deadline, "pause", version=version, epoch=epoch)
    if failed:
        # A partial pause is undone: no byte moved, so everybody may go on as before.
        late = Deadline(max(deadline.remaining(), _RESUME_SECONDS))
        whole = [shard for shard in present if shard not in stale]
        shards.apply(whole, pause.undo, late, "resume", version=version, epoch=epoch)
        raise_shards(failed)
    spent["pause"] = time.perf_counter() - begin

    stage("transfer")
    at = since = time.perf_counter()
    first_byte()
    feeding = None if feed is None else beside("weight-sync-feed", partial(feed, deadline))
    with closing(Caches([shards.all[shard] for shard in present], deadline)) as caches:
        request = Commit(epoch, plan.digest, version, verify, deadline.inner(), generations)
        committed, errors = shards.ask(
            dict.fromkeys(present, request),
            Committed,
            deadline,
            "transfer",
            version=version,
            epoch=epoch,
        )
        caches.commits_ended()
        if feeding is not None:
            errors |= _explain(feeding, errors, deadline)
        workers = [w for replies in committed.values() for w in replies]
        for name in {name for w in workers for name in w.seconds}:
            spent[name] = max(w.seconds.get(name, 0.0) for w in workers)
        inside = sum(spent.get(name, 0.0) for name in _WORKER_STAGES)
        spent["export"] = max(time.perf_counter() - at - inside, 0.0)

        stage("invalidate")
        at = time.perf_counter()
        errors |= _overtaken(shards, committed, version, epoch, since)
        good = [shard for shard in committed if shard not in errors]
        # Shards that committed go on, even if time ran out while others were waited for.
        late = Deadline(max(deadline.remaining(), _RESUME_SECONDS))

        def refresh(shard: EngineShard) -> None:
            caches.drop(shard, late)
            shard.set_version(version)

        done, failed = shards.apply(good, refresh, late, "invalidate", version=version, epoch=epoch)
        spent["invalidate"] = time.perf_counter() - at
        stage("resume")
        since, at = at, time.perf_counter()
        errors = errors | failed | _overtaken(shards, done, version, epoch, since)
        # A shard that kept stale caches must not serve either.
        done = [shard for shard in done if shard not in errors]
        _, stuck = shards.apply(done, _resume, late, "resume", version=version, epoch=epoch)
        spent["resume"] = time.perf_counter() - at
    errors = errors | stuck
    return Outcome(
        {s: r for s, r in committed.items() if s not in errors},
        errors,
        spent,
        time.perf_counter() - begin,
    )


def report_of(
    outcome: Outcome,
    plan: Plan,
    version: int,
    transport: str,
    seconds: dict[str, float],
    total_seconds: float,
) -> RefitReport:
    """The report of a refit that every shard of the plan committed.

    Args:
        outcome: What became of the shards.
        plan: What was run.
        version: What was installed.
        transport: How it travelled.
        seconds: Seconds per stage, of the whole refit.
        total_seconds: Of the whole refit.
    """
    workers = [w for replies in outcome.committed.values() for w in replies]
    return RefitReport(
        version=version,
        epoch=plan.membership.epoch,
        transport=transport,
        tensors=plan.tensors,
        bytes=sum(w.nbytes for w in workers),
        seconds=seconds,
        total_seconds=total_seconds,
        pause_seconds=outcome.pause_seconds,
        modes=workers[0].modes,
        verified=all(w.verified for w in workers),
        workers=len(workers),
    )


def _overtaken(
    shards: Shards, committed: Collection[int], version: int, epoch: int, since: float
) -> dict[int, WeightSyncError]:
    """Shards that somebody else attached, or gave another version, since they were asked to commit.

    This process may have been stopped meanwhile, and another one may drive the fleet. Nobody takes
    over in less than :data:`SURE_SECONDS`, so quick refits need not ask.
    """
    if not committed or time.perf_counter() - since < SURE_SECONDS:
        return {}
    states, errors = shards.ask(
        dict.fromkeys(committed, Status()), WorkerState, Deadline(_RESUME_SECONDS), "resume"
    )
    for shard, workers in states.items():
        if any((state.epoch, state.version) != (epoch, version) for state in workers):
            errors[shard] = StaleEpochError(
                f"shard {shard} was taken over by another controller while epoch {epoch} was "
                "installed; it was not resumed here. Whoever built the newest epoch drives it."
            )
    return errors


def _explain(
    feeding: Future[None], errors: Mapping[int, WeightSyncError], deadline: Deadline
) -> dict[int, WeightSyncError]:
    """Errors of shards, replaced by the trainer's where that is why they failed."""
    if not errors:
        return {}
    try:
        problem = feeding.exception(timeout=deadline.remaining())
    except TimeoutError:
        return {}
    if not isinstance(problem, WeightSyncError):
        return {}
    return {s: problem for s, e in errors.items() if isinstance(e, AbortedError | DeadlineError)}


class _Pause:
    """Pauses shards, and can take that back from those that pause too late as well."""

    def __init__(self) -> None:
        self._paused: set[int] = set()
        self._undone: set[int] = set()
        self._lock = threading.Lock()

    def __call__(self, shard: EngineShard) -> None:
        """Pauses; in a thread that may outlive the wait for it."""
        shard.pause()
        with self._lock:
            self._paused.add(id(shard))
            late = id(shard) in self._undone
        if late:
            shard.resume()

    def undo(self, shard: EngineShard) -> None:
        """Resumes a shard that is paused; one that is not yet goes on as soon as it is."""
        with self._lock:
            self._undone.add(id(shard))
            paused = id(shard) in self._paused
        if paused:
            shard.resume()


def _resume(shard: EngineShard) -> None:
    shard.resume()
