"""What is left of a call whose error went over the wire."""

from __future__ import annotations

import gc
import weakref

from weight_sync.errors import DeadlineError, RefitError
from weight_sync.failures import to_failure


class Group:
    """Something that must be freed when nobody uses it any more."""


def fail(seen: list[weakref.ref[Group]]) -> None:
    group = Group()
    seen.append(weakref.ref(group))
    error = RefitError("it broke", stage="transfer")
    raise error


def fail_later(seen: list[weakref.ref[Group]]) -> None:
    mine = Group()
    seen.append(weakref.ref(mine))
    try:
        fail(seen)
    except RefitError as error:
        late = DeadlineError("too late", stage="transfer")
        raise late from error


def test_what_a_failed_call_and_its_cause_held_is_free_without_the_collector() -> None:
    seen: list[weakref.ref[Group]] = []
    gc.collect()
    gc.disable()
    try:
        try:
            fail_later(seen)
        except DeadlineError as error:
            failure = to_failure(error, "transfer")
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()
    assert (failure.kind, failure.text) == ("DeadlineError", "too late")
