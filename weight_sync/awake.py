"""Refuses a refit of engines whose weights are asleep, before anything is paused or changed."""

from __future__ import annotations

from collections.abc import Sequence

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import EngineStateError, StaleEpochError, shorten
from weight_sync.messages import Status, WorkerState
from weight_sync.participants import Shards, raise_shards
from weight_sync.worker.sleep import WEIGHTS


def require_awake(
    shards: Shards, present: Sequence[int], version: int, epoch: int, deadline: Deadline
) -> None:
    """Asks every worker whether its weights are in memory, and whose they are.

    Args:
        shards: The fleet.
        present: Shards that take part.
        version: For errors.
        epoch: For errors.
        deadline: By when all must have answered.

    Raises:
        StaleEpochError: If another controller attached a shard since.
        EngineStateError: Naming the workers whose weights are asleep.
        WeightSyncError: If a worker did not answer.
    """
    states, errors = shards.ask(
        dict.fromkeys(present, Status()),
        WorkerState,
        deadline,
        "pause",
        version=version,
        epoch=epoch,
    )
    raise_shards(errors)
    for shard, replies in states.items():
        if any(state.epoch > epoch for state in replies):
            raise StaleEpochError(
                f"shard {shard} was attached in epoch {max(s.epoch for s in replies)} since epoch "
                f"{epoch} was built here: another controller drives it. Nothing was changed; stop "
                "one of the two."
            )
    asleep = [
        f"shard {shard} worker {worker}"
        for shard, replies in states.items()
        for worker, state in enumerate(replies)
        if WEIGHTS in state.asleep
    ]
    if asleep:
        raise EngineStateError(
            f"the weights of {shorten(asleep)} are asleep, so version {version} cannot be "
            'installed; nothing was changed. Wake them with wake_up(tags=["weights"]), refit, then '
            "wake the rest"
        )
