"""The facade on two GPUs: two shards of one GPU, then one shard on both, refitted in flight."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA GPUs", allow_module_level=True)

from generation.cluster import RayCluster
from generation.limits import Limits
from generation.vllm_generation import VllmGeneration
from tests.harness.fleets import (
    NEW,
    WAIT_S,
    Fleet,
    FreshEngine,
    Said,
    ask,
    checkpoint,
    kill_process,
    model,
    prompts,
    settings,
)
from tests.harness.gpu_fleets import START_S, FreshGpuEngine, ray_with_gpus, under_way
from tests.harness.gpu_trainers import GpuTrainers
from weight_sync.errors import GenerationUnavailableError
from weight_sync.identity import visible_devices
from weight_sync.membership import Membership
from weight_sync.report import RefitReport

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(300)]

STREAMS = 16
# What fleets that do not share their GPUs with a trainer are started with; both sides must agree.
NCCL = {"NCCL_CUMEM_ENABLE": "1"}

two_shards = pytest.mark.parametrize("fleet", [1], indirect=True, ids=["two-shards"])
every_fleet = pytest.mark.parametrize("fleet", [1, 2], indirect=True, ids=["two-shards", "tp2"])


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshEngine]:
    """Starts while the fleet does."""
    engine = FreshGpuEngine(checkpoint(tmp_path_factory.mktemp("new"), NEW))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def two_gpus(fresh: FreshEngine) -> Iterator[None]:
    with ray_with_gpus(2):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that fleets start from."""
    return checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, two_gpus: None, folder: Path) -> Iterator[Fleet]:
    """Async shards of as many GPUs as the parameter says.

    Two shards are refitted from a trainer on the second GPU, one shard from FSDP2 on both.
    """
    width: int = request.param
    devices, kind = (["cuda:1"], "plain") if width == 1 else (["cuda:0", "cuda:1"], "fsdp")
    engine = {"async_engine": True, "tensor_parallel_size": width, "skip_tokenizer_init": True}
    config = settings(
        folder,
        engine,
        max_new_tokens=230,
        vllm_kwargs={"disable_custom_all_reduce": True},
    )
    cluster = RayCluster([2] if width == 2 else [1, 1])
    with GpuTrainers(devices, NCCL) as trainers:
        gen = VllmGeneration(cluster, config, limits=Limits(load_s=START_S, call_s=WAIT_S))
        with trainers.weights(model(), kind) as weights:
            gen.prepare_refit_info(weights.infos)
            yield Fleet(gen, weights)  # type: ignore[arg-type] - offers what CPU trainers offer
            assert gen.shutdown() is True
    cluster.shutdown()


def crossing(
    fleet: Fleet, refit: Callable[..., list[Future[RefitReport]]], before: int
) -> list[Said]:
    """Refits to ``NEW`` under load; the answers with tokens of both versions."""
    version = fleet.publish()
    running = under_way(fleet.gen, STREAMS)
    (future,) = refit(version=version)
    assert future.result(WAIT_S).verified
    answers = running.answers()
    crossed = [a for a in answers if [s.weight_version for s in a.spans] == [before, version]]
    assert crossed, [a.spans for a in answers]
    return crossed


@every_fleet
def test_every_worker_has_a_gpu_of_its_own(fleet: Fleet):
    assert fleet.gen.device_uuids is not None
    found = [device for shard in fleet.gen.device_uuids for device in shard]
    assert sorted(found) == sorted(visible_devices())


@every_fleet
def test_a_refit_in_flight_switches_version_and_tokens_at_the_same_place(
    fleet: Fleet, fresh: FreshEngine
):
    before = fleet.refit(weights=5)
    crossed = crossing(fleet, fleet.gen.update_weights_via_ipc_zmq, before)
    assert {a.leader for a in crossed} == {
        fleet.gen.pool.leader_index(s) for s in fleet.gen.pool.shards
    }
    assert not fresh.off(crossed, [a.spans[1].start for a in crossed])


@every_fleet
def test_tokens_before_the_switch_are_not_those_of_the_new_weights(
    fleet: Fleet, fresh: FreshEngine
):
    fleet.refit(weights=6)
    answer = ask(fleet.gen, prompts(1)[0])
    assert len(fresh.off([answer])) > len(answer.tokens) // 2


@two_shards
@pytest.mark.parametrize("transport", ["broadcast", "reshard"])
def test_over_nccl_the_shard_beside_the_trainers_gpu_is_refitted_in_flight(
    fleet: Fleet, fresh: FreshEngine, transport: str
):
    """A group has one rank per GPU, so the shard on the trainer's own GPU stays out of it."""
    gen, trainer = fleet.gen, fleet.trainers.infos[0].device
    before = fleet.refit(weights=5)
    assert gen.device_uuids is not None
    (far,) = [s for s in gen.pool.shards if gen.device_uuids[s] != [trainer]]
    gen.set_refit_membership(Membership(1, 1, (far,), 1))
    try:
        if transport == "broadcast":
            (built,) = gen.init_collective("", 0, 2, train_world_size=1)
            refit = gen.update_weights_from_collective
        else:
            (built,) = gen.init_nccl_reshard_comm_group([], [], 1, 1, 2)
            refit = gen.nccl_reshard_refit
        assert built.result(WAIT_S).shards == (far,)
        crossed = crossing(fleet, refit, before)
    finally:
        gen.set_refit_membership(Membership(1, 1, gen.pool.shards, 1))
    assert {a.leader for a in crossed} == {far}
    assert not fresh.off(crossed, [a.spans[1].start for a in crossed])


@two_shards
def test_a_shard_killed_while_it_generates_comes_back_with_the_current_weights_bit_for_bit(
    fleet: Fleet, fresh: FreshEngine
):
    import ray

    gen = fleet.gen
    fleet.refit()
    running = under_way(gen, STREAMS)
    kill_process(ray.get(gen.pool.leader(0).pid.remote(), timeout=WAIT_S))
    outcomes = running.wait()
    lost = [o for o in outcomes if isinstance(o, BaseException)]
    assert lost
    assert all(isinstance(o, GenerationUnavailableError) for o in lost), lost
    assert {o.leader for o in outcomes if isinstance(o, Said)} == {1}

    version = fleet.refit()
    assert {ask(gen, p).spans[0].weight_version for p in prompts(2)} == {version}
    gen.restart_shard(0)
    assert {ask(gen, p).leader for p in prompts(2)} == {1}

    version = fleet.refit()
    for prompt in prompts(4):
        one, other = ask(gen, prompt), ask(gen, prompt)
        assert {one.leader, other.leader} == {0, 1}
        assert [s.weight_version for s in one.spans + other.spans] == [version] * 2
        # Bit for bit: each was the only request of its engine.
        assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
        assert not fresh.off([one])


@two_shards
def test_the_state_of_a_shards_machine_shows_its_gpus(fleet: Fleet):
    text = fleet.gen.log_shard_gpu_state(0, label="look", timeout_s=20)
    assert "GPU index, used, total: 0, " in text
    assert "MiB" in text
