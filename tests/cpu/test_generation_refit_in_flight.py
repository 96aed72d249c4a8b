"""Refits while requests run: versions of spans, tokens after the switch, caches, no deadlock."""

from __future__ import annotations

import threading
import time

import pytest

from generation.errors import FleetStateError
from tests.harness.fleets import WAIT_S, Fleet, FreshEngine, InFlight, ask, prompts

pytest_plugins = ["generation_fixtures"]
pytestmark = pytest.mark.timeout(240)

STREAMS = 16


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "reshard"])
def test_a_refit_in_flight_switches_version_and_tokens_at_the_same_place(
    fleet: Fleet, fresh: FreshEngine, transport: str
):
    before = fleet.refit(5, transport)
    running = InFlight(fleet.gen, prompts(STREAMS))
    time.sleep(0.4)
    after = fleet.refit(transport=transport)
    answers = running.answers()
    crossed = [a for a in answers if [s.weight_version for s in a.spans] == [before, after]]
    assert crossed, [a.spans for a in answers]
    assert not fresh.off(crossed, [a.spans[1].start for a in crossed])


def test_trainers_offered_under_the_reshard_name_are_those_of_every_transport(fleet: Fleet):
    fleet.gen.prepare_refit_info([])
    with pytest.raises(FleetStateError, match="no trainers"):
        fleet.gen.nccl_reshard_refit()
    fleet.gen.prepare_nccl_reshard_refit_info(fleet.trainers.infos)
    fleet.refit(transport="reshard")
    fleet.refit(transport="ipc")


def test_tokens_before_the_switch_are_not_those_of_the_new_weights(
    fleet: Fleet, fresh: FreshEngine
):
    fleet.refit(weights=6)
    answer = ask(fleet.gen, prompts(1)[0])
    assert len(fresh.off([answer])) > len(answer.tokens) // 2


@pytest.mark.parametrize("running", [False, True])
def test_a_prefix_cached_before_a_refit_is_never_used_after_it(
    fleet: Fleet, fresh: FreshEngine, running: bool
):
    prompt = prompts(1, length=140)[0]
    fleet.refit(weights=5)
    for _ in range(2 * fleet.gen.dp_size):
        ask(fleet.gen, prompt)
    load = InFlight(fleet.gen, prompts(4)) if running else None
    time.sleep(0.2)
    fleet.refit()
    answers = [ask(fleet.gen, prompt) for _ in range(2 * fleet.gen.dp_size)]
    assert {a.leader for a in answers} == {0, 1}
    assert not fresh.off(answers)
    if load is not None:
        load.answers()


def test_pause_refit_resume_under_load_never_deadlocks(fleet: Fleet):
    cycles = 12
    running = InFlight(fleet.gen, prompts(64))
    late: list[threading.Thread] = []
    outcomes: list[object] = []
    for cycle in range(cycles):
        assert fleet.gen.pause_generation_for_refit(clear_cache=bool(cycle % 2), timeout_s=WAIT_S)
        late.append(threading.Thread(target=lambda: outcomes.append(ask(fleet.gen, prompts(1)[0]))))
        late[-1].start()
        if cycle % 3:
            fleet.refit(weights=cycle)
        assert fleet.gen.resume_generation_after_refit(timeout_s=WAIT_S)
        assert fleet.gen.resume_generation_after_refit(timeout_s=WAIT_S)
        paused = fleet.gen.pool.ask([0, 1], "is_paused", timeout_s=WAIT_S)
        assert [a.value for a in paused.values()] == [False, False]
    running.answers()
    for thread in late:
        thread.join(WAIT_S)
    assert len(outcomes) == cycles


def test_a_refit_does_not_end_the_pause_of_somebody_else(fleet: Fleet):
    assert fleet.gen.pause_generation_for_refit(clear_cache=True)
    fleet.refit()
    paused = fleet.gen.pool.ask([0, 1], "is_paused", timeout_s=WAIT_S)
    assert [a.value for a in paused.values()] == [True, True]
    assert fleet.gen.resume_generation_after_refit()
