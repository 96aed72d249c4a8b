"""What the refit benchmark writes, from reports made by hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench import grid_cases, options
from bench.limits import Limit
from bench.models import config
from bench.result_json import Measured, describe
from bench.stages import StageTime
from weight_sync.report import RefitReport

WORKERS = 2


def report(transport: str, wire: float, nbytes: int = 8_000_000_000) -> RefitReport:
    return RefitReport(
        version=1,
        epoch=1,
        transport=transport,
        tensors=1,
        bytes=nbytes,
        seconds={"transfer": wire, "verify": 0.01},
        total_seconds=2 * wire,
        pause_seconds=0.001,
        modes={"direct": 1},
        verified=True,
        workers=WORKERS,
    )


def measured(transport: str, wire: float, alone: tuple[StageTime, ...] = ()) -> Measured:
    reports = [report(transport, wire)]
    return Measured(transport, LIMITS[transport], reports, reports.copy(), 0, True, list(alone))


LIMITS = {
    "ipc": Limit("peer copy", 400.0),
    "reshard": Limit("nccl send/recv", 400.0),
    "stage 0 alone": Limit("nccl send/recv", 200.0),
    "stage 1 alone": Limit("nccl send/recv", 200.0),
}


def described(*runs: Measured, natives: dict[str, list[float]] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    words = ["--trainer", "pp=2", "--engine", f"tp={WORKERS}", "--transport", "ipc,reshard"]
    found = options.parse(parser.parse_args(words))
    return describe(found, config("tiny"), LIMITS, runs, natives or {})


def test_rates_are_those_of_one_worker_held_against_the_limit_of_their_transport() -> None:
    result = described(measured("ipc", 0.0125), measured("reshard", 0.02))
    rates = {run["transport"]: run for run in result["runs"] if run["system"] == "weight_sync"}
    assert rates["ipc"]["gbps"] == pytest.approx(320)
    assert rates["ipc"]["fraction_of_limit"] == pytest.approx(0.8)
    assert rates["reshard"]["fraction_of_limit"] == pytest.approx(0.5)
    assert result["limit"] == {"kind": "peer copy", "gbps": 400.0}
    assert result["trainer"] == "pp=2"
    assert "stages" not in result


def test_stages_together_are_compared_with_one_after_the_other() -> None:
    alone = (StageTime(6_000_000_000, 0.03), StageTime(2_000_000_000, 0.01))
    result = described(measured("reshard", 0.025, alone))
    assert result["stages"]["speedup"] == pytest.approx(1.6)
    assert result["stages"]["speedup_of_plain_sends"] == pytest.approx(2.0)
    assert result["wrong"] == []


def test_stages_that_move_other_bytes_alone_are_reported_as_wrong() -> None:
    alone = (StageTime(6_000_000_000, 0.03),)
    result = described(measured("reshard", 0.025, alone))
    assert result["wrong"] == ["the stages alone moved 6000000000 bytes, together 8000000000"]


def test_others_are_compared_with_every_transport_without_their_first_refit() -> None:
    natives = {"vllm-native nccl packed": [9.0, 0.1, 0.1]}
    result = described(measured("ipc", 0.0125), measured("reshard", 0.025), natives=natives)
    assert result["ratios"] == {
        "vllm-native nccl packed": pytest.approx(4.0),
        "vllm-native nccl packed over reshard": pytest.approx(2.0),
    }


def test_who_compares_nothing_is_also_held_against_refits_that_do_not() -> None:
    natives = {"vllm-native nccl packed": [9.0, 0.1, 0.1]}
    result = described(measured("ipc", 0.0125), natives=natives)
    plain = next(r for r in result["runs"] if r["system"] == "weight_sync unverified")
    assert result["ratios_unverified"] == {
        "vllm-native nccl packed": pytest.approx(100 / plain["median_ms"])
    }


def test_the_summary_of_all_grids_shows_how_rates_grow(tmp_path: Path) -> None:
    for case, wire in zip((c for c in grid_cases.CASES if c.scaling), (0.04, 0.02), strict=False):
        result = described(measured("ipc", wire))
        (tmp_path / f"{case.name}.json").write_text(json.dumps(result))
    found: Any = grid_cases.summary(tmp_path)
    assert found["scaling_wire_gbps_by_gpus"] == {
        "ipc": {"2": pytest.approx(200), "4": pytest.approx(400)}
    }
    assert list(found["cases"]) == ["grid_dp1-to-tp1", "grid_dp2-to-tp2"]
