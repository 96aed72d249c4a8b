"""One refit, from paused engines to resumed ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from weight_sync.comm.deadline import Deadline
from weight_sync.engine import EngineShard
from weight_sync.errors import WeightSyncError
from weight_sync.messages import Commit, Committed
from weight_sync.participants import Shards, raise_shards
from weight_sync.plan import Plan

# Stages that happen inside a worker's commit and are reported by it.
_WORKER_STAGES = ("transfer", "process", "verify")


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
    seconds: float,
    generations: tuple[int, ...],
    first_byte: Callable[[], None],
    stage: Callable[[str], None],
) -> Outcome:
    """Pauses, installs, invalidates caches and resumes.

    Shards that did not commit stay paused: they may hold mixed weights and must not serve.

    Args:
        shards: The fleet.
        plan: The current plan.
        version: Version to install.
        verify: Whether workers compare digests.
        seconds: Deadline of each stage.
        generations: Export generation of every trainer rank, in rank order.
        first_byte: Called right before live weights may change.
        stage: Told which stage begins.

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
    paused, failed = shards.apply(
        present, _pause, Deadline(seconds), "pause", version=version, epoch=epoch
    )
    if failed:
        # A partial pause is undone: no byte moved, so everybody may go on.
        shards.apply(paused, _resume, Deadline(seconds), "resume", version=version, epoch=epoch)
        raise_shards(failed)
    spent["pause"] = time.perf_counter() - begin

    stage("transfer")
    at = time.perf_counter()
    first_byte()
    request = Commit(epoch, plan.digest, version, verify, seconds, generations)
    committed, errors = shards.ask(
        dict.fromkeys(present, request),
        Committed,
        Deadline(seconds),
        "transfer",
        version=version,
        epoch=epoch,
    )
    workers = [w for replies in committed.values() for w in replies]
    for name in {name for w in workers for name in w.seconds}:
        spent[name] = max(w.seconds.get(name, 0.0) for w in workers)
    inside = sum(spent.get(name, 0.0) for name in _WORKER_STAGES)
    spent["export"] = max(time.perf_counter() - at - inside, 0.0)

    stage("invalidate")
    at = time.perf_counter()
    good = list(committed)
    done, failed = shards.apply(
        good, _refresh(version), Deadline(seconds), "invalidate", version=version, epoch=epoch
    )
    spent["invalidate"] = time.perf_counter() - at
    stage("resume")
    at = time.perf_counter()
    # A shard that kept stale caches must not serve either, so only ``done`` go on.
    _, stuck = shards.apply(
        done, _resume, Deadline(seconds), "resume", version=version, epoch=epoch
    )
    spent["resume"] = time.perf_counter() - at
    errors = errors | failed | stuck
    return Outcome(
        {s: r for s, r in committed.items() if s not in errors},
        errors,
        spent,
        time.perf_counter() - begin,
    )


def _pause(shard: EngineShard) -> None:
    shard.pause()


def _resume(shard: EngineShard) -> None:
    shard.resume()


def _refresh(version: int) -> Callable[[EngineShard], None]:
    def refresh(shard: EngineShard) -> None:
        shard.invalidate()
        shard.set_version(version)

    return refresh
