"""Tags of an engine's memory, and what its workers say of it."""

from __future__ import annotations

import pytest

from generation.errors import InvalidRolloutError
from generation.memory import MEMORY_TAGS, asleep_by_worker, memory_tags
from weight_sync.errors import EngineStateError
from weight_sync.messages import Failure, WorkerState, encode


def test_no_tags_are_all_of_them() -> None:
    assert memory_tags(None) == MEMORY_TAGS


def test_an_unknown_tag_is_refused_by_name() -> None:
    with pytest.raises(InvalidRolloutError, match=r"unknown tags \['bogus'\]"):
        memory_tags(["weights", "bogus"])


def test_every_worker_speaks_for_itself() -> None:
    replies = [encode(WorkerState(1, False, 1, asleep)) for asleep in [("weights",), ()]]
    assert asleep_by_worker(replies) == [frozenset({"weights"}), frozenset()]


def test_memory_that_nobody_wakes_by_name_does_not_count() -> None:
    state = WorkerState(1, False, 1, ("kv_cache", "runtime"))
    assert asleep_by_worker([encode(state)]) == [frozenset({"kv_cache"})]


def test_a_worker_that_failed_is_an_error_that_names_it() -> None:
    replies = [encode(WorkerState(1, False, 1)), encode(Failure("EngineStateError", "broken"))]
    with pytest.raises(EngineStateError, match="worker 1"):
        asleep_by_worker(replies)
