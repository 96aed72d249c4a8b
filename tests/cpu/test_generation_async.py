"""Requests, stamps, errors and books of an async fleet."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
import torch

from generation.errors import FleetStateError, GenerationConfigError, InvalidRolloutError
from generation.fleet import GenerationFleetHealth
from generation.limits import Limits
from generation.selector import HealthyShardSelector
from tests.harness.fleets import MODEL_LEN, Fleet, ask, ask_async, batch, prompts
from weight_sync.errors import (
    DeadlineError,
    EngineStateError,
    GenerationUnavailableError,
    MembershipError,
)
from weight_sync.membership import Membership

pytest_plugins = ["generation_fixtures"]
pytestmark = pytest.mark.timeout(240)


def collect(steps: AsyncIterator[object]) -> list[object]:
    async def everything() -> list[object]:
        return [step async for step in steps]

    return asyncio.run(everything())


def test_an_answer_follows_the_unpadded_prompt_and_names_its_leader(fleet: Fleet):
    data = batch([5, 6, 7, 0, 0])
    data["input_lengths"] = torch.tensor([3])
    ((index, answer),) = collect(fleet.gen.generate_async(data, greedy=True))
    length = int(answer["generation_lengths"][0])
    assert index == 0
    assert length == fleet.gen.config.max_new_tokens
    assert answer["output_ids"].shape == (1, 5 + length)
    assert answer["output_ids"][0, :3].tolist() == [5, 6, 7]
    assert answer["output_ids"][0, 3 + length :].tolist() == [0, 0]
    assert (answer["logprobs"][0, :3] == 0).all()
    assert (answer["logprobs"][0, 3 : 3 + length] < 0).all()
    assert answer["unpadded_sequence_lengths"].tolist() == [3 + length]
    assert answer["truncated"].tolist() == [True]
    assert answer["gen_leader_worker_idx"][0] in (0, 1)


def test_a_request_may_ask_for_fewer_tokens(fleet: Fleet):
    asked = batch([5, 6, 7], max_new_tokens=[2])
    ((_, answer),) = collect(fleet.gen.generate_async(asked, greedy=True))
    assert answer["generation_lengths"].tolist() == [2]


def test_text_requests_end_with_a_stop_string_of_the_sample(fleet: Fleet):
    ((_, free),) = collect(fleet.gen.generate_text_async({"prompts": ["t5 t6 t7"]}, greedy=True))
    word = free["texts"][0].split()[3]
    data = {"prompts": ["t5 t6 t7"], "stop_strings": [[f"{word} "]]}
    ((_, stopped),) = collect(fleet.gen.generate_text_async(data, greedy=True))
    assert free["texts"][0].startswith(stopped["texts"][0])
    assert stopped["texts"][0].strip().endswith(word)
    assert len(stopped["texts"][0]) < len(free["texts"][0])


def test_a_prompt_that_fills_the_model_gets_an_empty_truncated_response(fleet: Fleet):
    ((_, answer),) = collect(fleet.gen.generate_async(batch([7] * MODEL_LEN)))
    assert answer["generation_lengths"].tolist() == [0]
    assert answer["truncated"].tolist() == [True]
    assert answer["weight_version_spans"] == [[]]


def test_an_empty_batch_yields_nothing(fleet: Fleet):
    assert collect(fleet.gen.generate_async({})) == []
    assert collect(fleet.gen.generate_async(batch())) == []


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"input_ids": torch.zeros(1, 3, dtype=torch.int64)}, "input_lengths"),
        (batch([3, 4], [5, 6]), "one sample"),
    ],
)
def test_a_batch_that_is_not_one_whole_sample_is_refused(fleet: Fleet, data: dict, says: str):
    with pytest.raises(InvalidRolloutError, match=says):
        collect(fleet.gen.generate_async(data))


def test_a_request_that_vllm_refuses_is_not_held_against_the_shard(fleet: Fleet):
    monitor = GenerationFleetHealth(2)
    fleet.gen.attach_fleet_health(monitor, HealthyShardSelector(monitor))
    try:
        data = {"input_ids": torch.zeros(1, 2, dtype=torch.int64), "input_lengths": torch.zeros(1)}
        with pytest.raises(InvalidRolloutError, match="vLLM refuses"):
            collect(fleet.gen.generate_async(data))
        assert [s.reported_failures for s in monitor.snapshot()] == [0, 0]
    finally:
        fleet.gen.roster.monitor = fleet.gen.roster.selector = None


def test_whole_batches_are_refused_by_an_async_fleet(fleet: Fleet):
    with pytest.raises(FleetStateError, match="async_engine=False"):
        fleet.gen.generate(batch([3]))
    with pytest.raises(FleetStateError, match="async_engine=False"):
        fleet.gen.generate_text({"prompts": ["t3"]})


def test_requests_go_to_the_shards_in_turn(fleet: Fleet):
    leaders = [ask(fleet.gen, prompts(1)[0]).leader for _ in range(4)]
    assert leaders in ([0, 1, 0, 1], [1, 0, 1, 0])


def test_an_attached_selector_chooses_the_shard_and_gets_it_back(fleet: Fleet):
    roster = fleet.gen.roster
    monitor = GenerationFleetHealth(2)
    selector = HealthyShardSelector(monitor)
    monitor.record_actor_death(0)
    fleet.gen.attach_fleet_health(monitor, selector)
    try:
        assert ask(fleet.gen, prompts(1)[0]).leader == 1
        assert fleet.gen._next_dp_shard_idx() == 1
        assert selector.outstanding(1) == 1
    finally:
        roster.monitor = roster.selector = None


def test_a_monitor_of_another_fleet_is_refused(fleet: Fleet):
    monitor = GenerationFleetHealth(3)
    with pytest.raises(GenerationConfigError, match="the monitor has 3 shards, the fleet 2"):
        fleet.gen.attach_fleet_health(monitor, HealthyShardSelector(monitor))


def test_a_request_that_takes_too_long_is_cancelled_and_counted(fleet: Fleet):
    roster, usual = fleet.gen.roster, fleet.gen.limits
    monitor = GenerationFleetHealth(2)
    fleet.gen.attach_fleet_health(monitor, HealthyShardSelector(monitor))
    fleet.gen.limits = dataclasses.replace(usual, request_s=0.5)
    try:
        assert fleet.gen.pause_generation_for_refit(clear_cache=False)
        with pytest.raises(GenerationUnavailableError, match=r"within 0\.5 s"):
            ask(fleet.gen, prompts(1)[0])
        assert [s.reported_failures for s in monitor.snapshot()] == [1, 0]
    finally:
        fleet.gen.limits = usual
        roster.monitor = roster.selector = None
        assert fleet.gen.resume_generation_after_refit()
    assert ask(fleet.gen, prompts(1)[0]).tokens


def test_cancelling_a_request_gives_its_shard_back(fleet: Fleet):
    roster = fleet.gen.roster
    monitor = GenerationFleetHealth(2)
    selector = HealthyShardSelector(monitor)
    fleet.gen.attach_fleet_health(monitor, selector)

    async def cancelled() -> int:
        task = asyncio.create_task(ask_async(fleet.gen, prompts(1)[0]))
        while not selector.outstanding(0):
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return selector.outstanding(0)

    try:
        assert asyncio.run(cancelled()) == 0
        assert monitor.snapshot()[0].reported_failures == 0
    finally:
        roster.monitor = roster.selector = None


def test_a_refit_without_a_version_takes_the_next_one(fleet: Fleet):
    fleet.refit()
    version = fleet.publish()
    (future,) = fleet.gen.update_weights_via_ipc_zmq()
    assert future.result(60).version == version


def test_groups_are_built_and_rebuilt_for_the_members_alone(fleet: Fleet):
    both = Membership(1, 1, (0, 1), 1)
    (built,) = fleet.gen.init_collective("127.0.0.1", 0, 3, train_world_size=1)
    assert built.result(60).shards == (0, 1)
    try:
        (rebuilt,) = fleet.gen.rebuild_collective(Membership(2, 1, (1,), 1), "127.0.0.1", 0)
        assert rebuilt.result(60).shards == (1,)
        version = fleet.refit(transport="broadcast")
        stamps = {a.leader: a.spans[0].weight_version for a in (ask(fleet.gen, [3]) for _ in "ab")}
        assert stamps[1] == version
        (rebuilt,) = fleet.gen.rebuild_nccl_reshard_comm_group(both, ["127.0.0.1"], [0], 1, 1, 3)
        assert rebuilt.result(60).shards == (0, 1)
    finally:
        fleet.gen.set_refit_membership(both)
    (built,) = fleet.gen.init_nccl_reshard_comm_group(["127.0.0.1"], [0], 1, 1, 3)
    assert built.result(60).workers == 2
    version = fleet.refit(transport="reshard")
    stamps = {a.leader: a.spans[0].weight_version for a in (ask(fleet.gen, [3]) for _ in "ab")}
    assert stamps == {0: version, 1: version}


def test_a_second_refit_while_one_runs_is_refused(fleet: Fleet):
    fleet.refit()
    fleet.version += 1
    (future,) = fleet.gen.update_weights_via_ipc_zmq(version=fleet.version)
    with pytest.raises(EngineStateError, match="a refit is running"):
        fleet.gen.update_weights_via_ipc_zmq()
    with pytest.raises(EngineStateError, match="a refit is running"):
        fleet.gen.prepare_refit_info(fleet.trainers.infos)
    fleet.trainers.publish(fleet.version, 1)
    assert future.result(60).verified


def test_a_trainer_that_never_publishes_fails_the_refit_and_leaves_the_engines_serving(
    fleet: Fleet,
):
    version = fleet.refit()
    (future,) = fleet.gen.update_weights_via_ipc_zmq(refit_timeout_s=1)
    with pytest.raises(DeadlineError, match=r"trainer 0 .*publish"):
        future.result(60)
    stamps = {a.leader: a.spans[0].weight_version for a in (ask(fleet.gen, [3]) for _ in "ab")}
    assert stamps == {0: version, 1: version}
    fleet.version += 1
    fleet.refit()


def test_a_membership_limits_refits_to_its_shards(fleet: Fleet):
    old = fleet.refit()
    fleet.gen.set_refit_membership(Membership(1, 1, (1,), 1))
    try:
        assert [shard for shard, _, _ in fleet.gen._refit_leaders_by_shard()] == [1]
        assert fleet.gen._refit_leader_workers() == [fleet.gen.pool.leader(1)]
        new = fleet.refit()
        stamps = {a.leader: a.spans[0].weight_version for a in (ask(fleet.gen, [3]) for _ in "ab")}
        assert stamps == {0: old, 1: new}
    finally:
        fleet.gen.set_refit_membership(Membership(1, 1, (0, 1), 1))
    fleet.refit()


def test_a_membership_of_shards_that_do_not_exist_is_refused(fleet: Fleet):
    with pytest.raises(MembershipError, match="the fleet has"):
        fleet.gen.set_refit_membership(Membership(1, 1, (7,), 1))


def test_devices_and_places_are_reported_by_shard(fleet: Fleet):
    assert fleet.gen._report_device_id() == [["cpu"], ["cpu"]]
    assert fleet.gen.device_uuids == [["cpu"], ["cpu"]]
    assert fleet.gen._get_tied_worker_bundle_indices(fleet.gen.cluster) == [(0, [0]), (1, [0])]


def test_limits_must_be_above_zero():
    with pytest.raises(GenerationConfigError, match="request_s must be above 0"):
        Limits(request_s=0)
