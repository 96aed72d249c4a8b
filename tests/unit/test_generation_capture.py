"""Capture of generated tokens with their weight versions."""

from __future__ import annotations

import itertools
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from generation.capture import (
    CaptureRecord,
    InMemorySink,
    JsonLinesSink,
    VersionSpan,
    read_json_lines,
    spans_of_versions,
)
from generation.errors import InvalidRolloutError


def record(request_id: str = "r", **changes: Any) -> CaptureRecord:
    """Returns a record of three tokens over two versions, with parts changed."""
    parts: dict[str, Any] = {
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3, 4, 5],
        "generation_logprobs": [-0.1, -1 / 3, -2.0],
        "version_spans": [VersionSpan(0, 1, 7), VersionSpan(1, 3, 8)],
    }
    return CaptureRecord(request_id=request_id, **(parts | changes))


def test_json_lines_round_trip_exactly(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "capture.jsonl")
    records = [record("a"), record("b\nc")]
    for each in records:
        sink.record(each)
    assert list(read_json_lines(tmp_path / "capture.jsonl")) == records
    sink.close()


def test_json_lines_append_to_what_is_there(tmp_path: Path) -> None:
    for name in ("a", "b"):
        sink = JsonLinesSink(tmp_path / "capture.jsonl")
        sink.record(record(name))
        sink.close()
    assert [r.request_id for r in read_json_lines(tmp_path / "capture.jsonl")] == ["a", "b"]


def test_json_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "capture.jsonl")

    def write(name: str) -> None:
        for _ in range(50):
            sink.record(record(name))

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5.0)
    sink.close()
    assert len(list(read_json_lines(tmp_path / "capture.jsonl"))) == 200


def test_line_cut_short_is_reported_by_number(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "capture.jsonl")
    sink.record(record())
    sink.close()
    with (tmp_path / "capture.jsonl").open("ab") as file:
        file.write(b'{"request_id": "cut')
    with pytest.raises(InvalidRolloutError, match="line 2 is not a capture record"):
        list(read_json_lines(tmp_path / "capture.jsonl"))


def test_closing_twice_is_safe(tmp_path: Path) -> None:
    sink = JsonLinesSink(tmp_path / "capture.jsonl")
    sink.close()
    sink.close()
    with pytest.raises(ValueError, match="closed"):
        sink.record(record())


def test_memory_sink_forgets_what_was_drained() -> None:
    sink = InMemorySink()
    sink.record(record("a"))
    assert [r.request_id for r in sink.drain()] == ["a"]
    assert sink.drain() == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generation_logprobs": [-0.1]}, "3 tokens with 1 logprobs"),
        ({"generation_logprobs": [0.0, math.nan, 0.0]}, "not finite"),
        ({"version_spans": []}, "end at token 0 of 3"),
        ({"version_spans": [VersionSpan(0, 2, 7)]}, "end at token 2 of 3"),
        ({"version_spans": [VersionSpan(0, 1, 7), VersionSpan(2, 3, 8)]}, "gap at token 1"),
        ({"version_spans": [VersionSpan(0, 0, 7), VersionSpan(0, 3, 8)]}, "gap at token 0"),
        ({"version_spans": [VersionSpan(0, 1, 8), VersionSpan(1, 3, 7)]}, "version 7 follows 8"),
    ],
)
def test_inconsistent_record_is_refused(changes: dict[str, Any], message: str) -> None:
    sink = InMemorySink()
    with pytest.raises(InvalidRolloutError, match=message):
        sink.record(record(**changes))
    assert sink.drain() == []


def test_request_without_generated_tokens_is_recorded() -> None:
    sink = InMemorySink()
    sink.record(record(generation_token_ids=[], generation_logprobs=[], version_spans=[]))
    assert len(sink.drain()) == 1


@given(st.lists(st.integers(0, 3), max_size=12))
def test_spans_give_every_token_its_version_back(versions: list[int]) -> None:
    spans = spans_of_versions(versions)
    assert [s.weight_version for s in spans for _ in range(s.stop - s.start)] == versions
    pairs = itertools.pairwise(spans)
    assert all(a.weight_version != b.weight_version and a.stop == b.start for a, b in pairs)
