"""A sync fleet of two shards, started deferred: batches, refits, validation, its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from generation.cluster import RayCluster
from generation.errors import FleetStateError, GenerationConfigError, InvalidRolloutError
from generation.node_probe import marked_processes
from generation.vllm_generation import VllmGeneration
from tests.harness.fleets import WAIT_S, Fleet, FreshEngine, batch, model, prompts, said, settings
from tests.harness.trainers import Trainers, TrainerSpec

pytest_plugins = ["generation_fixtures"]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def pair(local_ray: None, folder: Path) -> Iterator[Fleet]:
    """Two sync shards on one node."""
    cluster = RayCluster([2], gpus_per_bundle=0)
    config = settings(folder, stop_strings=["t99 "])
    gen = VllmGeneration(cluster, config, name_prefix="sync", defer_model_load=True)
    assert gen.device_uuids is None
    with pytest.raises(ray.exceptions.RayTaskError, match="load_and_start"):
        ray.get(gen.pool.leader(0).generate.remote(batch([3]), True), timeout=WAIT_S)
    gen.load_and_start()
    with Trainers(TrainerSpec(model())) as trainers:
        gen.prepare_refit_info(trainers.infos)
        yield Fleet(gen, trainers)
        marks = [gen.pool.mark(shard) for shard in (0, 1)]
        assert all(marked_processes(mark) for mark in marks)
        assert gen.shutdown() is True
        assert gen.shutdown() is True
        assert not any(marked_processes(mark) for mark in marks)
        with pytest.raises(FleetStateError, match="no workers"):
            gen.update_weights_via_ipc_zmq()
        cluster.shutdown()


def test_a_batch_that_does_not_divide_comes_back_in_order_and_padded(
    pair: Fleet, fresh: FreshEngine
):
    pair.refit()
    asked = [p[: 3 + 2 * i] for i, p in enumerate(prompts(3, length=8))]
    answer = pair.gen.generate(batch(*asked), greedy=True)
    new = pair.gen.config.max_new_tokens
    assert answer["output_ids"].shape == (3, 7 + new)
    assert answer["output_ids"].dtype == torch.int64
    assert answer["logprobs"].dtype == torch.float32
    for row, prompt in enumerate(asked):
        assert answer["output_ids"][row, : len(prompt)].tolist() == prompt
        assert (answer["output_ids"][row, len(prompt) + new :] == 0).all()
        assert (answer["logprobs"][row, : len(prompt)] == 0).all()
    assert answer["unpadded_sequence_lengths"].tolist() == [len(p) + new for p in asked]
    assert not fresh.off([said(p, answer, row) for row, p in enumerate(asked)])


def test_a_batch_smaller_than_the_fleet_is_answered(pair: Fleet):
    assert pair.gen.generate(batch([5, 6]), greedy=True)["generation_lengths"].tolist() == [12]


def test_an_empty_batch_gives_zero_sized_columns(pair: Fleet):
    answer = pair.gen.generate(batch())
    assert answer["output_ids"].shape == (0, 0)
    assert answer["generation_lengths"].dtype == torch.int64


def test_a_refit_reaches_every_sync_shard_and_stamps_its_tokens(pair: Fleet):
    version = pair.refit(weights=3)
    answer = pair.gen.generate(batch(*prompts(4)), greedy=True)
    assert [s[0].weight_version for s in answer["weight_version_spans"]] == [version] * 4


def test_sampling_differs_between_shards_and_greedy_does_not(pair: Fleet):
    same = batch(*[prompts(1)[0]] * 2)
    greedy = pair.gen.generate(same, greedy=True)["output_ids"]
    sampled = pair.gen.generate(same)["output_ids"]
    assert torch.equal(greedy[0], greedy[1])
    assert not torch.equal(sampled[0], sampled[1])


def test_stop_strings_of_sample_and_config_both_end_a_response(pair: Fleet):
    asked = {"prompts": ["t5 t6 t7", "t5 t6 t7"]}
    free = pair.gen.generate_text(asked, greedy=True)["texts"]
    words = free[0].split()
    stop = next(w for w in words[3:] if w not in words[:3])
    first = words.index(stop) + 1
    stops = {**asked, "stop_strings": [None, [f"{stop} "]]}
    unstopped, stopped = pair.gen.generate_text(stops, greedy=True)["texts"]
    assert unstopped == free[0]
    assert len(stopped.split()) in (first, first + 1)
    assert len(stopped.split()) < len(words)


def test_every_sample_may_ask_for_fewer_tokens(pair: Fleet):
    answer = pair.gen.generate(batch(*prompts(3), max_new_tokens=[5, None, 1]), greedy=True)
    assert answer["generation_lengths"].tolist() == [5, pair.gen.config.max_new_tokens, 1]
    assert answer["truncated"].all()


def test_the_ipc_transport_can_be_built_before_the_first_refit(pair: Fleet):
    pair.gen.prepare_refit_info(pair.trainers.infos)
    (built,) = pair.gen.init_ipc_zmq()
    membership = built.result(WAIT_S)
    (refit,) = pair.gen.update_weights_via_ipc_zmq(version=pair.publish())
    assert refit.result(WAIT_S).epoch == membership.epoch


def test_padding_in_the_wrong_place_is_refused_with_its_sample(pair: Fleet):
    data = batch([5, 6], [7, 8])
    data["input_lengths"] = torch.tensor([2, 1])
    with pytest.raises(InvalidRolloutError, match="other than pad id"):
        pair.gen.generate(data)


def test_a_missing_column_is_named(pair: Fleet):
    with pytest.raises(InvalidRolloutError, match="input_lengths"):
        pair.gen.generate({"input_ids": torch.zeros(1, 2, dtype=torch.int64)})
    with pytest.raises(InvalidRolloutError, match="prompts"):
        pair.gen.generate_text({})


def test_async_calls_are_refused_by_a_sync_fleet(pair: Fleet):
    with pytest.raises(FleetStateError, match="async_engine=True"):
        pair.gen.pause_generation_for_refit(clear_cache=True)
    with pytest.raises(FleetStateError, match="async_engine=True"):
        pair.gen.setup_token_capture(list)


def test_caches_are_dropped_with_an_explicit_answer(pair: Fleet):
    assert pair.gen.invalidate_kv_cache() is True
    assert pair.gen.finish_generation() is True
    assert pair.gen.prepare_for_generation(tags=["weights"]) is True


def test_a_fleet_without_servers_has_no_addresses(pair: Fleet):
    assert pair.gen.dp_openai_server_base_urls == [None, None]
    assert pair.gen._report_dp_openai_server_base_urls() == [None, None]


def test_loading_twice_is_refused(pair: Fleet):
    with pytest.raises(FleetStateError, match="loaded already"):
        pair.gen.load_and_start()


def test_group_sizes_that_are_not_the_fleets_are_refused(pair: Fleet):
    with pytest.raises(GenerationConfigError, match="are 3"):
        pair.gen.init_collective("127.0.0.1", 1, 9, train_world_size=1)
    with pytest.raises(GenerationConfigError, match="1 ranks were offered"):
        pair.gen.init_nccl_reshard_comm_group([], [], 2, 1, 3)


def test_every_impossible_setting_is_listed_before_anything_is_reserved(folder: Path):
    cluster = RayCluster([3], gpus_per_bundle=0)
    wrong = settings(
        folder,
        {"tensor_parallel_size": 2, "refit_with_reload_api": True, "expert_parallel_size": 4},
        refit_transport="reshard",
    )
    with pytest.raises(GenerationConfigError) as refused:
        VllmGeneration(cluster, wrong)
    text = str(refused.value)
    for part in (
        "no whole number of shards",
        "reload needs whole tensors",
        "expert_parallel_size=4",
    ):
        assert part in text
    assert cluster.bundles() == ()
