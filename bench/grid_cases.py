"""``python -m bench grids``: the refits that need 4 or 8 GPUs of one host, one after the other.

Each case is a ``python -m bench refit`` of its own, so that it finds empty GPUs and none can take
the others with it. Trainers have the GPUs after the engine's for every transport.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.grids import engine_grid, trainer_grid
from bench.models import config
from bench.options import TRANSPORTS


@dataclass(frozen=True)
class Case:
    """One refit.

    Attributes:
        trainer: ``--trainer``.
        engine: ``--engine``.
        model: ``--model``.
        tiny: A model with the same layers that fits a test machine.
        scaling: Whether it is one of those whose rates are compared over numbers of GPUs.
    """

    trainer: str
    engine: str
    model: str
    tiny: str
    scaling: bool = False

    @property
    def name(self) -> str:
        """As file names have it."""
        plain = f"{self.trainer}-to-{self.engine}".replace("=", "").replace(",", "")
        return f"grid_{plain}"

    @property
    def gpus(self) -> int:
        """GPUs that it takes: one for each rank and each worker."""
        cfg = config(self.model)
        return trainer_grid(self.trainer, cfg).ranks + engine_grid(self.engine, cfg).workers

    def devices(self, device: str) -> str:
        """``--trainer-devices``."""
        cfg = config(self.model)
        ranks, first = trainer_grid(self.trainer, cfg).ranks, engine_grid(self.engine, cfg).workers
        if device == "cpu":
            return ",".join(["cpu"] * ranks)
        return ",".join(f"cuda:{first + rank}" for rank in range(ranks))


_DENSE, _EXPERTS = ("qwen3-8b", "tiny"), ("qwen3-30b-a3b", "tiny-moe")
CASES = (
    Case("dp=1", "tp=1", *_DENSE, scaling=True),
    Case("pp=2", "tp=2", *_DENSE),
    Case("dp=2", "dp=2", *_DENSE),
    Case("dp=2", "tp=2", *_DENSE, scaling=True),
    Case("ep=2", "ep=2", *_EXPERTS),
    Case("ep=2", "tp=2", *_EXPERTS),
    Case("pp=2,ep=2", "tp=2,dp=2", *_EXPERTS),
    Case("dp=4", "tp=4", *_DENSE, scaling=True),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``grids``."""
    names = ", ".join(f"{case.name} ({case.gpus} GPUs)" for case in CASES)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--gpus", type=int, help="GPUs to use; default: all of the machine")
    parser.add_argument("--only", default="", help=f"comma separated; default: all of {names}")
    parser.add_argument("--transport", default=",".join(TRANSPORTS))
    parser.add_argument("--against", help="as for refit; default: vllm-native on GPUs")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=8.0, help="longest time of one case")
    parser.add_argument("--out", type=Path, required=True, help="folder for one JSON per case")
    parser.add_argument("--json", type=Path, help="summary; default: grids.json in the folder")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Runs the cases that fit and returns a summary of all results in the folder.

    Raises:
        SystemExit: If no case is chosen or known.
    """
    args.out.mkdir(parents=True, exist_ok=True)
    failed = {}
    for case in chosen(args):
        target = args.out / f"{case.name}.json"
        # An earlier result must not pass for this run's.
        target.unlink(missing_ok=True)
        problem = _run(command(case, args, target), args.minutes * 60)
        if problem:
            failed[case.name] = problem
            print(f"{case.name}: {problem}", file=sys.stderr, flush=True)
    args.json = args.json or args.out / "grids.json"
    return summary(args.out) | {"failed": failed}


def chosen(args: argparse.Namespace) -> list[Case]:
    """The cases to run."""
    wanted = [name for name in args.only.split(",") if name]
    unknown = set(wanted) - {case.name for case in CASES}
    if unknown:
        known = ", ".join(case.name for case in CASES)
        sys.exit(f"unknown cases {', '.join(sorted(unknown))}; known: {known}")
    gpus = args.gpus
    if gpus is None and args.device == "cuda":
        import torch

        gpus = torch.cuda.device_count()
    cases = [
        case
        for case in CASES
        if (not wanted or case.name in wanted) and (gpus is None or case.gpus <= gpus)
    ]
    if not cases:
        sys.exit(f"none of the cases fits {gpus} GPUs; the smallest takes {CASES[0].gpus}")
    return cases


def command(case: Case, args: argparse.Namespace, target: Path) -> list[str]:
    """The benchmark of a case."""
    cuda = args.device == "cuda"
    out = [sys.executable, "-m", "bench", "refit", "--device", args.device]
    out += ["--model", case.model if cuda else case.tiny]
    out += ["--trainer", case.trainer, "--engine", case.engine, "--transport", args.transport]
    out += ["--trainer-devices", case.devices(args.device), "--repeat", str(args.repeat)]
    against = args.against
    if against is None:
        against = "vllm-native" if cuda else ""
    out += ["--against", against]
    return [*out, "--json", str(target)]


def _run(words: Sequence[str], seconds: float) -> str:
    """Runs a command; returns what went wrong, if anything."""
    print(shlex.join(words), file=sys.stderr, flush=True)
    try:
        done = subprocess.run(words, stdout=subprocess.DEVNULL, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"did not end within {seconds:g} s"
    return "" if done.returncode == 0 else f"ended with status {done.returncode}"


def summary(folder: Path) -> dict[str, object]:
    """What the results of a folder say, case by case, and how rates grow with GPUs."""
    cases: dict[str, Any] = {}
    scaling: dict[str, dict[str, float]] = {}
    for case in CASES:
        path = folder / f"{case.name}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        workers = len(result["engine_devices"])
        cases[case.name] = {
            "gpus": case.gpus,
            "model": result["model"],
            "device": result["device"],
            "limits": result["limits"],
            "transports": {
                run["transport"]: {
                    "wire_gbps_of_all_workers": run["gbps"] * workers,
                    "fraction_of_limit": run["fraction_of_limit"],
                    "median_ms": run["median_ms"],
                    "pause_ms": run["pause_ms"],
                    "verified": run["verified"],
                }
                for run in result["runs"]
                if run["system"] == "weight_sync"
            },
            "stages": result.get("stages"),
            "ratios": result["ratios"],
        }
        if case.scaling:
            for transport, run in cases[case.name]["transports"].items():
                rates = scaling.setdefault(transport, {})
                rates[str(case.gpus)] = run["wire_gbps_of_all_workers"]
    return {"cases": cases, "scaling_wire_gbps_by_gpus": scaling}
