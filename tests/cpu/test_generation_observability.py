"""Metrics of a step, sampled gauges, and profiling of a running fleet."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.harness.fleets import MODEL_LEN, Fleet, InFlight, ask, prompts

pytest_plugins = ["generation_fixtures"]
pytestmark = pytest.mark.timeout(240)


def test_step_metrics_count_what_was_generated_since_the_snapshot(fleet: Fleet):
    ask(fleet.gen, prompts(1)[0])
    fleet.gen.snapshot_step_metrics()
    answers = InFlight(fleet.gen, prompts(6, length=9)).answers()
    found = fleet.gen.get_step_metrics()
    assert found["vllm/prompt_tokens"] == 6 * 9
    assert found["vllm/generation_tokens"] == sum(len(a.tokens) for a in answers)
    assert found["vllm/generations_ok"] == 6
    assert found["vllm/generation_length_mean"] == fleet.gen.config.max_new_tokens
    assert found["vllm/spec_acceptance_length"] == 1.0


def test_step_metrics_without_a_snapshot_warn_and_are_empty(fleet: Fleet):
    with pytest.warns(RuntimeWarning, match="without snapshot"):
        assert fleet.gen.get_step_metrics() == {}


def test_a_second_snapshot_warns(fleet: Fleet):
    fleet.gen.snapshot_step_metrics()
    with pytest.warns(RuntimeWarning, match="called twice"):
        fleet.gen.snapshot_step_metrics()
    fleet.gen.get_step_metrics()


def test_sampled_gauges_show_the_load_of_every_shard_and_can_be_drained(fleet: Fleet):
    fleet.gen.clear_logger_metrics()
    InFlight(fleet.gen, prompts(16)).answers()
    time.sleep(0.2)
    found = fleet.gen.get_logger_metrics()
    assert set(found["generation_tokens"]) == {0, 1}
    for shard in (0, 1):
        assert max(found["inflight_batch_sizes"][shard]) >= 1
        assert len(found["kv_cache_usage_perc"][shard]) > 1
    latest = fleet.gen.drain_latest_logger_metrics()
    assert {len(v) for v in latest["generation_tokens"].values()} == {1}
    assert len(fleet.gen.get_logger_metrics()["generation_tokens"].get(0, [])) <= 4


def test_profiling_writes_a_trace_of_every_shard(fleet: Fleet):
    folder = Path(fleet.gen.config.vllm_kwargs["profiler_config"]["torch_profiler_dir"])
    fleet.gen.start_gpu_profiling()
    for _ in range(2):
        ask(fleet.gen, [3] * (MODEL_LEN - 2))  # leaves room for two tokens, and a small trace
    fleet.gen.stop_gpu_profiling()
    traces = [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size]
    assert len(traces) >= 2
