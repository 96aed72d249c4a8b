"""One colocated async shard of two tensor parallel workers: every worker counts; sleep and wake."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from generation.cluster import RayCluster
from generation.node_probe import marked_processes
from generation.vllm_generation import VllmGeneration
from tests.harness.fleets import (
    WAIT_S,
    Fleet,
    FreshEngine,
    InFlight,
    ask,
    kill_process,
    model,
    prompts,
    settings,
)
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.errors import RefitError

pytest_plugins = ["generation_fixtures"]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def wide(local_ray: None, folder: Path) -> Iterator[Fleet]:
    """One shard, two workers."""
    cluster = RayCluster([2], gpus_per_bundle=0)
    config = settings(
        folder,
        {"async_engine": True, "tensor_parallel_size": 2},
        colocated=True,
        max_new_tokens=100,
    )
    gen = VllmGeneration(cluster, config, name_prefix="wide")
    with Trainers(TrainerSpec(model(), "fsdp", 2)) as trainers:
        gen.prepare_refit_info(trainers.infos)
        yield Fleet(gen, trainers)
        gen.shutdown()
        cluster.shutdown()


def test_both_workers_of_a_shard_are_refitted_from_sharded_trainers(
    wide: Fleet, fresh: FreshEngine
):
    version = wide.refit()
    answer = ask(wide.gen, prompts(1)[0])
    assert [s.weight_version for s in answer.spans] == [version]
    assert not fresh.off([answer])
    assert wide.gen._report_device_id() == [["cpu", "cpu"]]


def test_sleep_and_wake_by_tags_answer_explicitly_and_requests_wait_for_the_last_tag(
    wide: Fleet, fresh: FreshEngine
):
    old = wide.refit(weights=4)
    gen = wide.gen
    running = InFlight(gen, prompts(4))
    time.sleep(0.1)
    assert gen.finish_generation() is True
    waiting = InFlight(gen, prompts(1))
    assert gen.prepare_for_generation(tags=["weights"]) is True
    paused = gen.pool.ask([0], "is_paused", timeout_s=WAIT_S)[0].value
    assert paused is True
    version = wide.refit()
    assert gen.prepare_for_generation(tags=["kv_cache"]) is True
    (answer,) = waiting.answers()
    assert [s.weight_version for s in answer.spans] == [version]
    for answer in running.answers():
        assert [s.weight_version for s in answer.spans][-1] == version
        assert {s.weight_version for s in answer.spans} <= {old, version}
        assert not fresh.off([answer], answer.spans[-1].start)


def test_a_refit_into_sleeping_weights_is_refused(wide: Fleet):
    wide.refit()
    assert wide.gen.finish_generation() is True
    version = wide.publish()
    (future,) = wide.gen.update_weights_via_ipc_zmq(version=version)
    with pytest.raises(Exception, match="asleep, so version"):
        future.result(WAIT_S)
    assert wide.gen.prepare_for_generation() is True
    assert ask(wide.gen, [3]).spans[0].weight_version == version - 1


def test_waking_does_not_end_the_pause_of_somebody_else(wide: Fleet):
    gen = wide.gen
    assert gen.pause_generation_for_refit(clear_cache=True)
    assert gen.finish_generation() is True
    assert gen.resume_generation_after_refit() is False
    assert gen.pause_generation_for_refit(clear_cache=True)
    assert gen.prepare_for_generation() is True
    assert gen.pool.ask([0], "is_paused", timeout_s=WAIT_S)[0].value is True
    assert gen.resume_generation_after_refit() is True
    assert ask(gen, [3]).tokens


def test_an_unknown_tag_is_not_success(wide: Fleet):
    assert wide.gen.prepare_for_generation(tags=["wheights"]) is False


def test_sleep_of_an_engine_that_vllm_leaves_half_awake_is_not_success_and_wakes_whole(
    wide: Fleet,
):
    gen = wide.gen
    assert gen.finish_generation() is True
    assert gen.prepare_for_generation(tags=["kv_cache"]) is True
    assert gen.finish_generation() is False
    assert gen.prepare_for_generation() is True
    assert ask(gen, [3]).tokens


def test_a_cache_that_running_requests_use_is_not_dropped_and_the_answer_says_so(wide: Fleet):
    running = InFlight(wide.gen, prompts(4, length=140))
    refused = []
    while running._thread.is_alive():
        refused.append(wide.gen.invalidate_kv_cache())
    running.answers()
    assert False in refused
    assert wide.gen.invalidate_kv_cache() is True


def test_a_dead_second_worker_fails_the_refit_of_its_shard(wide: Fleet):
    """The last test of this fleet: it ends it."""
    found = marked_processes(wide.gen.pool.mark(0))
    (second,) = [pid for pid, name in found.items() if "Worker_TP1" in name]
    kill_process(second)
    version = wide.publish()
    (future,) = wide.gen.update_weights_via_ipc_zmq(version=version, refit_timeout_s=8)
    with pytest.raises(RefitError):
        future.result(WAIT_S)
    assert wide.gen.roster.serving() == []
    with pytest.raises(ray.exceptions.RayTaskError):
        ray.get(wide.gen.shard_liveness_ref(0), timeout=WAIT_S)
