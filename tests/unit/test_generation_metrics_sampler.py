"""Sampled gauges."""

from __future__ import annotations

import time
from types import SimpleNamespace

from generation.metrics_sampler import MetricsSampler


def gauges() -> list[SimpleNamespace]:
    return [
        SimpleNamespace(name="vllm:num_requests_running", value=2),
        SimpleNamespace(name="vllm:num_requests_running", value=3),
        SimpleNamespace(name="vllm:kv_cache_usage_perc", value=0.5),
        SimpleNamespace(name="vllm:request_prompt_tokens", buckets={}),
    ]


def test_labels_of_one_series_add_up_and_absent_series_are_left_out():
    sampler = MetricsSampler(1.0, gauges)
    sampler.sample()
    sampler.sample()
    found = sampler.read(latest=False, clear=False)
    assert found == {"inflight_batch_sizes": [5.0, 5.0], "kv_cache_usage_perc": [0.5, 0.5]}


def test_draining_returns_the_last_values_and_forgets_the_history():
    sampler = MetricsSampler(1.0, gauges)
    sampler.sample()
    sampler.sample()
    assert sampler.read(latest=True, clear=True)["kv_cache_usage_perc"] == [0.5]
    assert sampler.read(latest=False, clear=False) == {}


def test_the_thread_samples_until_closed():
    sampler = MetricsSampler(0.01, gauges)
    sampler.start()
    deadline = time.monotonic() + 5
    while not sampler.read(latest=True, clear=False) and time.monotonic() < deadline:
        time.sleep(0.01)
    sampler.close()
    count = len(sampler.read(latest=False, clear=False)["kv_cache_usage_perc"])
    time.sleep(0.05)
    assert count > 0
    assert len(sampler.read(latest=False, clear=False)["kv_cache_usage_perc"]) == count
