"""Telemetry of generation calls, and metrics in Prometheus' text format."""

from __future__ import annotations

import logging

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from generation import telemetry
from generation.prometheus import prometheus_text

DATA = {"input_lengths": torch.tensor([3, 4])}
COMBINED = {"generation_lengths": torch.tensor([5, 6])}


class ListSink:
    """Keeps what it is told."""

    def __init__(self, is_exporting: bool = True) -> None:
        self.is_exporting = is_exporting
        self.calls: list[dict[str, object]] = []

    def record_inference(self, **call: object) -> None:
        """Stores one call."""
        self.calls.append(call)


class BrokenSink(ListSink):
    """Fails on every call."""

    def record_inference(self, **call: object) -> None:
        """Fails."""
        raise OSError("collector gone")


def test_tokens_and_duration_reach_the_sink() -> None:
    sink = ListSink()
    telemetry._record_vllm_generation_metrics("tiny", DATA, COMBINED, 1.5, sink=sink)
    assert sink.calls == [
        {
            "provider": "vllm",
            "model": "tiny",
            "input_tokens": 7,
            "output_tokens": 11,
            "duration_s": 1.5,
        }
    ]


def test_absent_columns_are_reported_as_unknown() -> None:
    sink = ListSink()
    telemetry._record_vllm_generation_metrics(None, {}, {}, sink=sink)
    assert (sink.calls[0]["input_tokens"], sink.calls[0]["output_tokens"]) == (None, None)


def test_nothing_is_recorded_unless_exporting() -> None:
    sink = ListSink(is_exporting=False)
    telemetry._record_vllm_generation_metrics("tiny", DATA, COMBINED, sink=sink)
    assert sink.calls == []


def test_broken_sink_never_fails_generation_and_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry._warn_once, "done", False)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            telemetry._record_vllm_generation_metrics("tiny", DATA, COMBINED, sink=BrokenSink())
    assert caplog.text.count("collector gone") == 1


def test_prometheus_text_is_read_back_by_a_prometheus_parser() -> None:
    text = prometheus_text(
        {"vllm/prompt_tokens": 3.0, "0dd": float("inf"), "nan": float("nan")},
        labels={"model": 'a"b\\c\nd'},
    )
    families = {family.name: family.samples[0] for family in text_string_to_metric_families(text)}
    assert families["vllm_prompt_tokens"].value == 3.0
    assert families["_0dd"].value == float("inf")
    assert families["nan"].value != families["nan"].value
    assert families["_0dd"].labels == {"model": 'a"b\\c\nd'}


def test_prometheus_text_without_labels_has_no_braces() -> None:
    assert prometheus_text({"a": 1}) == "# TYPE a gauge\na 1.0\n"


def test_prometheus_names_that_collide_are_refused() -> None:
    with pytest.raises(ValueError, match="both named a_b"):
        prometheus_text({"a/b": 1.0, "a_b": 2.0})
