"""One colocated sync shard of two workers: what it answers about sleep and life is so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from generation.answers import translate
from generation.cluster import RayCluster
from generation.errors import InvalidRolloutError
from generation.memory import asleep_by_worker
from generation.node_probe import marked_processes
from generation.vllm_generation import VllmGeneration
from tests.harness.fleets import WAIT_S, batch, kill_process, settings
from weight_sync.messages import Status, encode

pytest_plugins = ["generation_fixtures"]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def gen(local_ray: None, folder: Path) -> Iterator[VllmGeneration]:
    cluster = RayCluster([2], gpus_per_bundle=0)
    config = settings(folder, {"tensor_parallel_size": 2}, colocated=True)
    gen = VllmGeneration(cluster, config, name_prefix="sync-wide")
    yield gen
    gen.shutdown()
    cluster.shutdown()


@pytest.fixture
def awake(gen: VllmGeneration) -> Iterator[VllmGeneration]:
    yield gen
    assert gen.prepare_for_generation() is True
    assert gen.generate(batch([5, 6]), greedy=True)["generation_lengths"].tolist() == [12]


def asleep(gen: VllmGeneration) -> list[set[str]]:
    """What memory each worker says is asleep."""
    call = gen.pool.leader(0).weight_sync_call.remote(encode(Status()))
    return [set(tags) for tags in asleep_by_worker(ray.get(call, timeout=WAIT_S))]


def test_sleep_is_true_when_every_worker_sleeps(awake: VllmGeneration):
    assert awake.finish_generation() is True
    assert asleep(awake) == [{"weights", "kv_cache"}] * 2


def test_a_partial_wake_is_true_when_that_memory_is_back(awake: VllmGeneration):
    awake.finish_generation()
    assert awake.prepare_for_generation(tags=["weights"]) is True
    assert asleep(awake) == [{"kv_cache"}] * 2
    assert awake.prepare_for_generation(tags=["weights"]) is True


def test_sleep_of_an_engine_that_vllm_leaves_half_awake_is_not_success(awake: VllmGeneration):
    awake.finish_generation()
    assert awake.prepare_for_generation(tags=["kv_cache"]) is True
    assert awake.finish_generation() is False
    assert asleep(awake) == [{"weights"}] * 2


def test_an_unknown_tag_is_not_success_and_wakes_nothing(awake: VllmGeneration):
    awake.finish_generation()
    assert awake.prepare_for_generation(tags=["bogus"]) is False
    assert asleep(awake) == [{"weights", "kv_cache"}] * 2


def test_an_unknown_tag_is_the_callers_error(gen: VllmGeneration):
    answer = gen.pool.ask([0], "wake_up", ["bogus"], timeout_s=WAIT_S)[0]
    assert isinstance(answer.error, InvalidRolloutError)


def liveness_error(gen: VllmGeneration) -> BaseException:
    """Asks whether the shard lives until the answer is that it does not."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        try:
            ray.get(gen.shard_liveness_ref(0), timeout=WAIT_S)
        except ray.exceptions.RayError as error:
            return error
        time.sleep(0.05)
    raise AssertionError("the engine says that it lives")


def test_an_engine_that_lost_a_worker_is_not_alive(gen: VllmGeneration):
    """The last test of this fleet: it ends it."""
    assert ray.get(gen.shard_liveness_ref(0), timeout=WAIT_S) is True
    found = marked_processes(gen.pool.mark(0))
    (second,) = [pid for pid, name in found.items() if "Worker_TP1" in name]
    kill_process(second)
    _, dead = translate(liveness_error(gen), "shard 0", "probe")
    assert dead
