"""The memory of an engine that can sleep, and what of it does, by its workers' word.

vLLM's own answers do not tell: a wake of a tag that it does not know, or that is awake, is logged
and does nothing, and an engine that somebody paused counts as sleeping.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from generation.errors import InvalidRolloutError
from weight_sync.engine import read_states

MEMORY_TAGS = frozenset({"weights", "kv_cache"})


def memory_tags(tags: Iterable[str] | None) -> frozenset[str]:
    """Returns the tags, all of them for None.

    Raises:
        InvalidRolloutError: An unknown tag.
    """
    wanted = MEMORY_TAGS if tags is None else frozenset(tags)
    if not wanted <= MEMORY_TAGS:
        raise InvalidRolloutError(
            f"unknown tags {sorted(wanted - MEMORY_TAGS)}; known: {sorted(MEMORY_TAGS)}"
        )
    return wanted


def asleep_by_worker(replies: Sequence[bytes]) -> list[frozenset[str]]:
    """Reads what memory is asleep from the workers' replies to ``Status``, in rank order.

    Raises:
        WeightSyncError: A worker failed.
    """
    return [MEMORY_TAGS & frozenset(state.asleep) for state in read_states(replies)]
