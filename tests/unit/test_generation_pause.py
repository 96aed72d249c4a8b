"""Several reasons to stand still."""

from __future__ import annotations

import pytest

from generation.pause import REFIT, SLEEP, USER, PauseOwners
from weight_sync.errors import EngineStateError


def test_the_engine_goes_on_only_when_the_last_reason_ends():
    owners = PauseOwners()
    owners.add(USER)
    owners.add(REFIT)
    assert owners.remove(USER) is False
    assert owners.any
    assert owners.remove(REFIT) is True
    assert not owners.any


def test_pausing_twice_needs_one_resume_and_resuming_twice_is_harmless():
    owners = PauseOwners()
    owners.add(USER)
    owners.add(USER)
    assert owners.remove(USER) is True
    assert owners.remove(USER) is True


def test_waking_is_refused_only_while_a_refit_is_unfinished():
    owners = PauseOwners()
    owners.add(SLEEP)
    owners.check_wake()
    owners.add(REFIT)
    with pytest.raises(EngineStateError, match="refit it before waking"):
        owners.check_wake()
