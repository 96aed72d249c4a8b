"""What ``python -m bench refit`` writes: JSON, and a chart of it."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.limits import Limit
from bench.models import Config, shapes
from bench.options import Options
from bench.provenance import provenance
from bench.stages import StageTime
from weight_sync.report import RefitReport

# A plain copy may be slower once than in another run; more than that, and a figure is wrong.
_TOLERANCE = 1.05


@dataclass(frozen=True)
class Measured:
    """What one transport did.

    Attributes:
        transport: Its name.
        limit: What its rate is held against.
        verified: Reports of verified refits.
        plain: Reports of refits without verification.
        extra_bytes: Memory that the first worker's GPU had less after the first refit.
        final: Whether the last refit, after everything else, was verified.
        alone: Pipeline stages one after the other, if there are several.
    """

    transport: str
    limit: Limit
    verified: list[RefitReport]
    plain: list[RefitReport]
    extra_bytes: int
    final: bool
    alone: list[StageTime]


def describe(
    options: Options,
    cfg: Config,
    limits: Mapping[str, Limit],
    measured: Sequence[Measured],
    natives: Mapping[str, list[float]],
) -> dict[str, object]:
    """The JSON object of one benchmark.

    Args:
        options: What ran.
        cfg: Configuration of the model.
        limits: Rates of plain copies, by what they are the limit of.
        measured: One per transport.
        natives: Seconds of each refit of what ran beside, by name; the first one does not count.

    Returns:
        What to write. ``wrong`` says which figures cannot be; it is empty in a good run.
    """
    runs: list[dict[str, Any]] = []
    for one in measured:
        runs.append(_run(options, one, one.verified, "weight_sync"))
        runs.append(_run(options, one, one.plain, "weight_sync unverified"))
    ratios, unverified = {}, {}
    ours = _median([r.total_seconds for r in measured[0].verified])
    plain = _median([r.total_seconds for r in measured[0].plain])
    for name, seconds in natives.items():
        median = _median(seconds[1:])
        runs.append({"system": name, "transport": name.split()[1], "median_ms": median * 1e3})
        ratios[name] = median / ours
        # What runs beside compares nothing.
        unverified[name] = median / plain
        for one in measured[1:]:
            mine = _median([r.total_seconds for r in one.verified])
            ratios[f"{name} over {one.transport}"] = median / mine
    wrong = []
    if options.device == "cuda":
        wrong += [_above_limit(run) for run in runs if "limit" in run]
    out: dict[str, object] = {
        "model": options.model,
        "layers": options.layers or cfg["num_hidden_layers"],
        "tensors": len(list(shapes(cfg))),
        "bytes": measured[0].verified[0].bytes,
        "device": _device_name(options),
        "trainer": str(options.trainer),
        "engine": str(options.engine),
        "trainer_devices": list(options.trainer_devices),
        "engine_devices": list(options.engine_devices),
        "engine_tp": options.engine.tp,
        "limit": _limit(measured[0].limit),
        "limits": {name: _limit(limit) for name, limit in limits.items()},
        "runs": runs,
        "ratios": ratios,
        "ratios_unverified": unverified,
        **provenance(),
    }
    for one in measured:
        if one.alone:
            out["stages"] = _stages(one, limits)
            wrong.append(_other_bytes(one))
    return out | {"wrong": [text for text in wrong if text]}


def _run(
    options: Options, one: Measured, reports: Sequence[RefitReport], name: str
) -> dict[str, Any]:
    wire = _median([r.seconds["transfer"] for r in reports])
    gbps = reports[0].bytes / 1e9 / wire / options.engine.workers
    return {
        "system": name,
        "transport": one.transport,
        "median_ms": _median([r.total_seconds for r in reports]) * 1e3,
        "wire_ms": wire * 1e3,
        "pause_ms": _median([r.pause_seconds for r in reports]) * 1e3,
        "overhead_ms": _median([r.overhead_seconds for r in reports]) * 1e3,
        "stages_ms": {
            s: _median([r.seconds.get(s, 0.0) for r in reports]) * 1e3 for s in reports[0].seconds
        },
        "gbps": gbps,
        "limit": _limit(one.limit),
        "fraction_of_limit": gbps / one.limit.gbps,
        "verified": reports is one.verified and one.final and all(r.verified for r in reports),
        "modes": reports[0].modes,
        "extra_memory_mb": one.extra_bytes / 2**20,
    }


def _above_limit(run: dict[str, Any]) -> str:
    """What is wrong with a rate that no plain copy reaches; empty if nothing is."""
    if run["fraction_of_limit"] <= _TOLERANCE:
        return ""
    return (
        f"{run['system']}, {run['transport']}: {run['gbps']:.0f} GB/s is above the "
        f"{run['limit']['kind']} limit of {run['limit']['gbps']:.0f} GB/s measured in this run"
    )


def _other_bytes(one: Measured) -> str:
    """What is wrong with stages that, alone, do not move what they move together."""
    alone, together = sum(stage.nbytes for stage in one.alone), one.plain[0].bytes
    if alone == together:
        return ""
    return f"the stages alone moved {alone} bytes, together {together}"


def _stages(one: Measured, limits: Mapping[str, Limit]) -> dict[str, object]:
    """Pipeline stages together against one after the other, as refits and as plain sends."""
    together = _median([r.seconds["transfer"] for r in one.plain])
    nbytes = sum(stage.nbytes for stage in one.alone)
    plain = [
        stage.nbytes / limits[f"stage {number} alone"].gbps
        for number, stage in enumerate(one.alone)
    ]
    return {
        "transport": one.transport,
        "together_ms": together * 1e3,
        "alone_ms": [stage.seconds * 1e3 for stage in one.alone],
        "speedup": sum(stage.seconds for stage in one.alone) / together,
        "speedup_of_plain_sends": sum(plain) * limits[one.transport].gbps / nbytes,
    }


def _limit(limit: Limit) -> dict[str, object]:
    return {"kind": limit.kind, "gbps": limit.gbps}


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


def _device_name(options: Options) -> str:
    if options.device == "cuda":
        import torch

        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def plot(result: dict[str, object], path: Path) -> None:
    """Bar chart of medians."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = result["runs"]
    assert isinstance(runs, list)
    figure, axes = pyplot.subplots(figsize=(7, 0.6 * len(runs) + 1.2))
    labels = [f"{r['system']}, {r['transport']}" for r in runs]
    axes.barh(labels, [r["median_ms"] for r in runs], color="#4477aa")
    axes.set_xlabel("median refit, ms")
    axes.set_title(f"{result['model']}, {result['device']}, {result['date']}")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
