"""Shards that die while they generate or refit: replaced, refitted before they serve, routed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import aiohttp
import pytest
import ray

from generation.fleet import FleetHealthPolicy, GenerationFleetHealth, ShardState
from generation.keeper import FleetKeeper
from generation.node_probe import marked_processes
from generation.router import GenerationRouter
from generation.selector import HealthyShardSelector
from generation.supervisor import EngineSupervisor
from tests.harness.fleets import (
    WAIT_S,
    Fleet,
    FreshEngine,
    InFlight,
    Said,
    ask,
    kill_process,
    prompts,
)
from weight_sync.errors import EngineStateError, GenerationUnavailableError

pytest_plugins = ["generation_fixtures"]
pytestmark = pytest.mark.timeout(300)

RESTART_S = 240.0


@pytest.fixture
def health(fleet: Fleet) -> Iterator[GenerationFleetHealth]:
    """Attaches a monitor; ends with both shards restarted if need be, and serving."""
    urls = fleet.gen.dp_openai_server_base_urls
    monitor = GenerationFleetHealth(2, FleetHealthPolicy(unhealthy_threshold=2), urls)
    fleet.gen.attach_fleet_health(monitor, HealthyShardSelector(monitor))
    fleet.refit()
    yield monitor
    for shard in monitor.absent_shards():
        fleet.gen.restart_shard(shard)
    if len(monitor.serving_shards()) < 2:
        fleet.refit()
    fleet.gen.roster.monitor = fleet.gen.roster.selector = None


def engine_pid(fleet: Fleet, shard: int) -> int:
    """Process of a shard's engine, behind its actor."""
    found = marked_processes(fleet.gen.pool.mark(shard))
    (pid,) = [pid for pid, name in found.items() if "EngineCore" in name]
    return pid


def actor_pid(fleet: Fleet, shard: int) -> int:
    return ray.get(fleet.gen.pool.leader(shard).pid.remote(), timeout=WAIT_S)


def test_a_shard_killed_while_it_generates_is_replaced_and_serves_only_after_a_refit(
    fleet: Fleet, health: GenerationFleetHealth, fresh: FreshEngine
):
    gen = fleet.gen
    old_mark, old_url = gen.pool.mark(0), gen.dp_openai_server_base_urls[0]
    router = GenerationRouter(api_key=None, backend_api_key=gen.http_api_key)
    router.start()
    supervisor = EngineSupervisor(health, gen.restart_shard, RESTART_S)
    keeper = FleetKeeper(gen, health, supervisor=supervisor, router=router)
    keeper.tick()
    assert router.backends() == gen.dp_openai_server_base_urls

    running = InFlight(gen, prompts(12))
    time.sleep(0.3)
    kill_process(actor_pid(fleet, 0))
    outcomes = running.wait()
    lost = [o for o in outcomes if isinstance(o, BaseException)]
    assert lost
    assert all(isinstance(o, GenerationUnavailableError) for o in lost), lost
    assert {o.leader for o in outcomes if isinstance(o, Said)} == {1}
    assert health.state_of(0) is ShardState.DEAD

    # The rest goes on, refits included, while the replacement starts.
    assert keeper.tick() == [0]
    assert router.backends() == [gen.dp_openai_server_base_urls[1]]
    version = fleet.refit()
    assert {ask(gen, p).spans[0].weight_version for p in prompts(3)} == {version}
    deadline = time.monotonic() + RESTART_S
    while health.state_of(0) is not ShardState.STALE and time.monotonic() < deadline:
        time.sleep(0.2)
        keeper.tick()
    assert health.state_of(0) is ShardState.STALE, health.snapshot()[0]
    assert not marked_processes(old_mark)

    # Loaded, alive, and nobody gets an answer from it before it holds the current weights.
    url = gen.dp_openai_server_base_urls[0]
    assert url != old_url
    assert router.backends() == [gen.dp_openai_server_base_urls[1]]
    assert {ask(gen, p).leader for p in prompts(3)} == {1}
    with pytest.raises(ray.exceptions.RayTaskError, match="waits for its first refit"):
        ray.get(gen.pool.leader(0).generate_async.remote({}, True), timeout=WAIT_S)
    assert asyncio.run(post(f"{url}/chat/completions", gen.http_api_key)) == 503

    version = fleet.refit()
    keeper.tick()
    assert health.state_of(0) is ShardState.HEALTHY
    assert router.backends() == gen.dp_openai_server_base_urls
    answers = InFlight(gen, prompts(8)).answers()
    assert {a.leader for a in answers} == {0, 1}
    assert {a.spans[0].weight_version for a in answers} == {version}
    assert not fresh.off(answers)
    router.close()


async def post(url: str, key: str) -> int:
    headers = {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with (
        aiohttp.ClientSession(headers=headers, timeout=timeout) as session,
        session.post(url, json={}) as reply,
    ):
        return reply.status


def test_a_shard_killed_in_a_refit_is_named_and_the_others_get_the_new_weights(
    fleet: Fleet, health: GenerationFleetHealth, fresh: FreshEngine
):
    gen = fleet.gen
    pid, mark = engine_pid(fleet, 1), gen.pool.mark(1)
    shard = gen.refits._shards[1]
    usual = shard.call

    def dies(request: bytes) -> list[bytes]:
        threading.Timer(0.001, kill_process, [pid]).start()
        return usual(request)

    running = InFlight(gen, prompts(8))
    time.sleep(0.2)
    shard.call = dies
    version = fleet.publish()
    (future,) = gen.update_weights_via_ipc_zmq(version=version, refit_timeout_s=30)
    report = future.result(WAIT_S)
    assert (report.absent, report.workers) == ((1,), 1)
    assert "shard 1" in report.retried
    del shard.call
    running.wait()
    assert health.state_of(0) is ShardState.HEALTHY
    assert health.state_of(1) is ShardState.DEAD
    answers = [ask(gen, p) for p in prompts(3)]
    assert {a.leader for a in answers} == {0}
    assert {a.spans[0].weight_version for a in answers} == {version}
    assert not fresh.off(answers)
    assert fleet.refit() == version + 1

    assert "EngineCore" not in gen.log_shard_gpu_state(1, label="test")
    url = gen.restart_shard(1)
    assert url == gen.dp_openai_server_base_urls[1]
    assert not marked_processes(mark)
    assert health.state_of(1) is ShardState.STALE
    version = fleet.refit()
    assert health.state_of(1) is ShardState.HEALTHY
    answers = InFlight(gen, prompts(8)).answers()
    assert {a.leader for a in answers} == {0, 1}
    assert {a.spans[0].weight_version for a in answers} == {version}


def test_a_replacement_that_dies_before_its_first_refit_does_not_hold_up_the_others(
    fleet: Fleet, health: GenerationFleetHealth
):
    gen = fleet.gen
    gen.restart_shard(1)
    kill_process(actor_pid(fleet, 1))
    version = fleet.refit()
    assert health.state_of(1) is ShardState.DEAD
    assert {a.spans[0].weight_version for a in (ask(gen, p) for p in prompts(3))} == {version}


def test_liveness_resolves_for_a_living_engine(fleet: Fleet):
    assert ray.get(fleet.gen.shard_liveness_ref(0), timeout=WAIT_S) is True


def test_the_state_of_a_shards_machine_names_its_engine_process(fleet: Fleet):
    text = fleet.gen.log_shard_gpu_state(0, label="look", timeout_s=20)
    assert text.startswith("look: shard 0: processes [")
    assert f"{engine_pid(fleet, 0)} VLLM::EngineCore" in text


def test_a_machine_that_cannot_be_looked_at_is_reported_not_raised(fleet: Fleet):
    assert "did not answer" in fleet.gen.log_shard_gpu_state(9, label="x", timeout_s=1)


def test_a_shard_that_does_not_exist_cannot_be_restarted(fleet: Fleet):
    with pytest.raises(EngineStateError, match="cannot be replaced"):
        fleet.gen.restart_shard(9)


def test_a_retired_shard_is_not_restarted(fleet: Fleet):
    monitor = GenerationFleetHealth(2)
    fleet.gen.attach_fleet_health(monitor, HealthyShardSelector(monitor))
    mark = fleet.gen.pool.mark(0)
    monitor.retire(0, "test")
    try:
        with pytest.raises(EngineStateError, match="not restarted any more"):
            fleet.gen.restart_shard(0)
    finally:
        fleet.gen.roster.monitor = fleet.gen.roster.selector = None
    assert fleet.gen.pool.mark(0) == mark
    assert ask(fleet.gen, [3]).tokens
