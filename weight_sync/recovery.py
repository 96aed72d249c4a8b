"""What a failed refit means: who is missing, whether the survivors may try again, what to say."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from weight_sync.errors import (
    DeadlineError,
    PeerDeadError,
    RefitError,
    TransportError,
    WeightSyncError,
)
from weight_sync.fanout import located
from weight_sync.messages import AbortGroups, encode
from weight_sync.rollcall import Missing, roll_call
from weight_sync.wire.address import Address

_WORKER = re.compile(r"shard (\d+)\b")
_FATAL = "trainer"
_NEW_TRAINER = (
    "start the trainer again, with a new WeightSynchronizer and a higher version; engines need no "
    "restart, and those that took part are stale until one full verified refit succeeds"
)
_NEW_SHARD = "restart the shard and give it to replace_shard(), then refit"


def shards_of(names: Iterable[str]) -> set[int]:
    """Shards that participants such as ``"shard 1 worker 0"`` belong to."""
    return {int(found[1]) for name in names if (found := _WORKER.match(name))}


@dataclass(frozen=True)
class Stock:
    """What is left after a failed attempt.

    Attributes:
        missing: Who did not answer.
        reached: Shards of which every worker answered.
    """

    missing: Missing
    reached: frozenset[int]


def take_stock(
    trainers: Mapping[str, Address],
    controls: Mapping[str, tuple[Address, int]],
    epoch: int,
    frozen: Collection[str],
    reason: str,
    seconds: float,
) -> Stock:
    """Ends what others still do for a failed attempt, and asks who is left.

    Args:
        trainers: Where trainer ranks listen.
        controls: Where workers answer, and since which epoch.
        epoch: The epoch that failed.
        frozen: Participants that are known to be frozen already.
        reason: Why the attempt failed.
        seconds: How long an answer may take.
    """
    workers = {name: address for name, (address, _) in controls.items()}
    asked = {n: a for n, a in {**trainers, **workers}.items() if n not in frozen}
    found = roll_call(asked, seconds, encode(AbortGroups(epoch, reason)))
    # An address of an earlier epoch may be closed because its worker has a new one.
    dead = {n for n in found.dead if n not in controls or controls[n][1] == epoch}
    missing = Missing(frozenset(dead), found.frozen.union(frozen))
    reached = shards_of(workers) - shards_of(found.names) - shards_of(frozen)
    return Stock(missing, frozenset(reached))


def fatal(missing: Missing) -> bool:
    """Whether a trainer rank is missing: nobody else has its weights."""
    return any(name.startswith(_FATAL) for name in missing.names)


def worth_retrying(error: BaseException, missing: Missing, lost: Iterable[int]) -> bool:
    """Whether a second attempt can end otherwise than the first.

    It can if shards are lost, which then do not take part, or if only a connection was. An error
    of a participant that runs would come again.

    Args:
        error: How the first attempt ended.
        missing: Who did not answer afterwards.
        lost: Shards that were lost in it.
    """
    if fatal(missing):
        return False
    return bool(set(lost)) or isinstance(error, PeerDeadError | TransportError)


def explain(
    error: Exception, missing: Missing, stage: str, version: int, epoch: int, torn: Collection[int]
) -> Exception:
    """The error of a failed attempt, naming everybody who is missing.

    Whoever runs into a frozen rank only knows that something did not come. The roll call knows who
    is frozen, so that is what the error says, and what the others saw becomes its cause.

    Args:
        error: What was raised.
        missing: Who did not answer afterwards.
        stage: What went on.
        version: The version that was being sent.
        epoch: Membership epoch.
        torn: Shards that may hold mixed weights.
    """
    if not missing.names:
        if isinstance(error, RefitError):
            error = located(error, version, epoch, (), _aftermath(torn))
            if isinstance(error, PeerDeadError):
                error.add_note("everybody who is known answers: only a connection was lost")
            return error
        if isinstance(error, WeightSyncError):
            error.add_note(f"(stage={stage}, version={version}, epoch={epoch})")
        return error
    reasons = []
    if missing.dead:
        reasons.append(f"{', '.join(sorted(missing.dead))} died")
    if missing.frozen:
        reasons.append(
            f"{', '.join(sorted(missing.frozen))} is frozen: the process exists but does not answer"
        )
    kind = PeerDeadError if missing.dead else DeadlineError
    found = kind(
        "; ".join(reasons),
        stage=error.stage if isinstance(error, RefitError) else stage,
        version=version,
        epoch=epoch,
        ranks=sorted(missing.names),
        remedy=_NEW_TRAINER if fatal(missing) else _NEW_SHARD,
    )
    found.__cause__ = error
    found.add_note(f"seen as: {error}")
    return found


def _aftermath(torn: Collection[int]) -> str:
    if not torn:
        return "nothing live was changed"
    return (
        f"shards {sorted(torn)} may hold mixed weights; they stay paused until a refit succeeds, "
        "which is verified in any case"
    )
