"""Step metrics from two snapshots of engine counters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generation import metrics

DRAFTS = "vllm:spec_decode_num_drafts"
DRAFT_TOKENS = "vllm:spec_decode_num_draft_tokens"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"

Snapshot = dict[str | tuple[str, int], float]


def reason(name: str) -> str:
    """Returns the counter key of a finish reason."""
    return metrics.encode_counter_key("vllm:request_success", f"finished_reason={name}")


NAMES = st.text("ab:_", max_size=4)
PARTS = st.text("ab|", max_size=4)


@given(left=st.tuples(NAMES, PARTS), right=st.tuples(NAMES, PARTS))
def test_counter_keys_of_different_pairs_differ(
    left: tuple[str, str], right: tuple[str, str]
) -> None:
    same = metrics.encode_counter_key(*left) == metrics.encode_counter_key(*right)
    assert same == (left == right)


def test_counter_key_refuses_a_name_with_the_separator() -> None:
    with pytest.raises(ValueError, match="cannot contain"):
        metrics.encode_counter_key("a|b", "c")


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        (DRAFTS, True),
        ("vllm:prompt_tokens", True),
        ("vllm:prompt_tokens_total", True),
        ("vllm:request_prompt_tokens|sum", True),
        ("vllm:num_preemptions", True),
        (reason("stop"), True),
        ("vllm:prompt_tokens_by_source", False),
        ("vllm:num_requests_running", False),
        ("my_spec_decode_thing", False),
    ],
)
def test_only_series_that_are_read_are_kept(name: str, kept: bool) -> None:
    assert metrics._is_kept(name) is kept


def test_engine_metrics_are_flattened_and_summed_over_labels() -> None:
    def counter(name: str, value: float, **labels: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, labels=labels, value=value)

    def histogram(total: float, count: int) -> SimpleNamespace:
        return SimpleNamespace(
            name="vllm:request_prompt_tokens", labels={}, sum=total, count=count, buckets={}
        )

    flat = metrics.flatten_engine_metrics(
        [
            counter("vllm:prompt_tokens", 3, engine="0"),
            counter("vllm:prompt_tokens", 4, engine="1"),
            counter("vllm:request_success", 2, finished_reason="stop"),
            counter("vllm:num_requests_running", 9),
            SimpleNamespace(name=PER_POSITION, labels={}, values=[5, 1]),
            SimpleNamespace(name=PER_POSITION, labels={}, values=[1, 1]),
            histogram(10.0, 2),
        ]
    )
    assert flat == {
        "vllm:prompt_tokens": 7.0,
        reason("stop"): 2.0,
        PER_POSITION: [6.0, 2.0],
        "vllm:request_prompt_tokens|sum": 10.0,
        "vllm:request_prompt_tokens|count": 2.0,
    }


def test_workers_add_up_and_positions_count_from_one() -> None:
    report: dict[str, Any] = {DRAFTS: 2.0, PER_POSITION: [3.0, 1.0], "vllm:other": 5.0}
    totals = metrics.aggregate_spec_decode_counters([report, report])
    assert totals == {DRAFTS: 4.0, (PER_POSITION, 1): 6.0, (PER_POSITION, 2): 2.0}


def test_first_delta_takes_the_first_candidate_present() -> None:
    delta: Snapshot = {"b": 1.0, "c": 2.0, "a|sum": 3.0}
    assert metrics._first_delta(delta, ("a", "b", "c")) == 1.0
    assert metrics._first_delta(delta, ("a",), "sum") == 3.0
    assert metrics._first_delta(delta, ("x",)) is None


@pytest.mark.parametrize(
    ("delta", "mean"),
    [
        ({"h|sum": 6.0, "h|count": 2.0}, 3.0),
        ({"h|sum": 0.0, "h|count": 0.0}, None),
        ({"h|sum": 6.0}, None),
        ({}, None),
    ],
)
def test_histogram_mean_exists_only_for_observed_requests(
    delta: dict[str | tuple[str, int], float], mean: float | None
) -> None:
    assert metrics._mean_from_histogram(delta, ("h",)) == mean


def test_step_metrics_are_differences_between_snapshots() -> None:
    start: Snapshot = {"vllm:prompt_tokens": 10.0, reason("stop"): 1.0}
    end: Snapshot = {
        "vllm:prompt_tokens": 25.0,
        "vllm:generation_tokens_total": 7.0,
        "vllm:request_generation_tokens|sum": 7.0,
        "vllm:request_generation_tokens|count": 2.0,
        "vllm:num_preemptions": 1.0,
        reason("stop"): 3.0,
        reason("length"): 1.0,
        reason("error"): 2.0,
    }
    assert metrics.compute_engine_step_metrics(start, end) == {
        "vllm/prompt_tokens": 15.0,
        "vllm/generation_tokens": 7.0,
        "vllm/generation_length_mean": 3.5,
        "vllm/preemptions": 1.0,
        "vllm/generations_ok": 3.0,
        "vllm/generations_failed": 2.0,
    }


def test_absent_series_are_omitted_not_zero() -> None:
    assert metrics.compute_engine_step_metrics({}, {}) == {}


def test_series_reset_by_a_restart_is_omitted() -> None:
    start: Snapshot = {"vllm:prompt_tokens": 100.0, "vllm:generation_tokens": 5.0}
    end: Snapshot = {"vllm:prompt_tokens": 3.0, "vllm:generation_tokens": 9.0}
    assert metrics.compute_engine_step_metrics(start, end) == {"vllm/generation_tokens": 4.0}


def test_spec_decode_rates_come_from_the_step_alone() -> None:
    start: Snapshot = {DRAFTS: 10.0, DRAFT_TOKENS: 20.0, ACCEPTED: 20.0, (PER_POSITION, 1): 8.0}
    end: Snapshot = {DRAFTS: 14.0, DRAFT_TOKENS: 32.0, ACCEPTED: 26.0, (PER_POSITION, 1): 11.0}
    assert metrics.compute_spec_decode_metrics(start, end) == {
        "vllm/spec_num_drafts": 4.0,
        "vllm/spec_num_draft_tokens": 12.0,
        "vllm/spec_num_accepted_tokens": 6.0,
        "vllm/spec_acceptance_length": 2.5,
        "vllm/spec_acceptance_rate": 0.5,
        f"vllm/{PER_POSITION}-1": 3.0,
        "vllm/spec_acceptance_rate-pos-1": 0.75,
    }


@pytest.mark.parametrize("end", [{}, {DRAFTS: 5.0, ACCEPTED: 0.0}])
def test_spec_decode_without_drafts_or_after_a_reset_reports_none(end: Snapshot) -> None:
    start: Snapshot = {DRAFTS: 2.0, ACCEPTED: 3.0} if end else {}
    assert metrics.compute_spec_decode_metrics(start, end) == {
        "vllm/spec_num_drafts": 0.0,
        "vllm/spec_num_draft_tokens": 0.0,
        "vllm/spec_num_accepted_tokens": 0.0,
        "vllm/spec_acceptance_length": 1.0,
        "vllm/spec_acceptance_rate": 0.0,
    }
