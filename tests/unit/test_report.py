"""Rates, lines and exports of a refit report."""

from __future__ import annotations

import msgspec

from weight_sync.report import STAGES, RefitReport

REPORT = RefitReport(
    version=7,
    epoch=2,
    transport="ipc",
    tensors=3,
    bytes=4_000_000_000,
    seconds={"transfer": 2.0, "process": 0.5, "verify": 0.25, "publish": 0.125},
    total_seconds=3.0,
    pause_seconds=2.9,
    modes={"direct": 2, "processed": 1},
    verified=True,
    workers=2,
)


def test_rate_counts_payload_over_the_transfer_stage() -> None:
    assert REPORT.gbps == 2.0


def test_overhead_is_what_is_neither_transfer_nor_process_nor_verify() -> None:
    assert REPORT.overhead_seconds == 0.25


def test_line_shows_stages_in_order_and_whether_it_was_verified() -> None:
    line = REPORT.line()
    assert line.startswith("v7 ipc 4000.0 MB in 3000.0 ms")
    shown = [s for s in STAGES if f"{s}=" in line]
    assert shown == ["publish", "transfer", "process", "verify"]
    assert line.index("publish=125.0") < line.index("transfer=2000.0")
    assert line.endswith("verified=True")


def test_prometheus_has_one_sample_per_stage() -> None:
    lines = REPORT.prometheus().splitlines()
    assert 'weight_sync_version{transport="ipc"} 7' in lines
    assert 'weight_sync_stage_seconds{transport="ipc",stage="verify"} 0.25' in lines
    assert sum("stage_seconds{" in line for line in lines) == len(REPORT.seconds)


def test_chrome_trace_puts_stages_one_after_the_other() -> None:
    events = REPORT.chrome_trace()
    assert [e["name"] for e in events] == ["publish", "transfer", "process", "verify"]
    ends = [float(e["ts"]) + float(e["dur"]) for e in events]  # type: ignore[arg-type]
    assert [e["ts"] for e in events[1:]] == ends[:-1]
    assert ends[-1] == 2_875_000.0


def test_report_survives_serialization() -> None:
    assert msgspec.json.decode(msgspec.json.encode(REPORT), type=RefitReport) == REPORT
