"""The fault matrix: every kind of failure, of everybody, in every stage, over every transport."""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import groupby

from bench.fault_cells import TRANSPORTS, Cell, all_cells
from bench.fault_fleet import Fleet, HealError
from bench.fault_rebuilds import run_rebuilds
from bench.fault_run import Result, run_cell
from bench.provenance import provenance
from tests.harness import processes

_HEAD = ("transport", "who", "fault", "stage", "outcome", "s", "consistent", "leaks", "healed")
# Small enough for continuous integration, and everything at least once.
SUBSET = "subset"
REBUILDS = "rebuilds"
# Starting on a busy machine, where everything is cold.
_START_ATTEMPTS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``python -m bench faults``."""
    parser.add_argument(
        "--only",
        default="",
        metavar="NAME",
        help=f'cells whose name contains this, e.g. "ipc/worker/kill"; "{SUBSET}" for a sample, '
        f'"{REBUILDS}" for rebuilds in a row only',
    )
    parser.add_argument("--json", metavar="FILE", help="where to write the result")


def subset() -> list[Cell]:
    """One cell in seventeen, so that kinds, stages and participants all come up."""
    return list(all_cells())[::17]


def run(only: str) -> dict[str, object]:
    """Runs the cells and prints a row for each.

    Args:
        only: Part of the names of cells, or ``"subset"``, or ``"rebuilds"``.

    Returns:
        The JSON document.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    processes.preload(["bench.fault_warm"])
    cells = subset() if only == SUBSET else list(all_cells(only))
    load = os.getloadavg()[0]
    start = time.monotonic()
    results: list[Result] = []
    print(_row(_HEAD), file=sys.stderr)
    for transport, group in groupby(cells, lambda cell: cell.transport):
        results += _run_on(transport, list(group))
    rebuilds = [_rebuilds(t) for t in TRANSPORTS] if only in ("", REBUILDS) else []
    bad = [r for r in results if not r.good]
    return {
        "cells": [r.as_json() for r in results],
        "total": len(results),
        "bad": len(bad),
        "recovered": sum(r.outcome == "recovered" for r in results),
        "named_errors": sum(r.outcome == "named_error" for r in results),
        "rebuilds": rebuilds,
        "engine": "stand-in",
        "cores": os.cpu_count(),
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
        "selection": only or "all",
        "seconds": round(time.monotonic() - start, 1),
        **provenance(),
    }


def _run_on(transport: str, cells: list[Cell]) -> list[Result]:
    results: list[Result] = []
    fleet: Fleet | None = None
    try:
        for cell in cells:
            if fleet is None:
                fleet, launched = _start(transport)
            result = run_cell(fleet, cell, launched)
            results.append(result)
            print(_row(_columns(result)), file=sys.stderr, flush=True)
            if not result.good:
                print(f"    {result.error}\n    {result.leaked}", file=sys.stderr, flush=True)
            if not result.healed or result.leaks:
                fleet.close()
                fleet = None
    finally:
        if fleet is not None:
            fleet.close()
    return results


def _rebuilds(transport: str) -> dict[str, object]:
    fleet, _ = _start(transport)
    with fleet:
        found = run_rebuilds(fleet).as_json()
    print(found, file=sys.stderr, flush=True)
    return found


def _start(transport: str) -> tuple[Fleet, dict[str, int]]:
    """A fleet after a good refit, with the bytes each process launches in one."""
    fleet = Fleet(transport)
    for attempt in range(_START_ATTEMPTS):
        try:
            fleet.refit()
            break
        except HealError:
            if attempt == _START_ATTEMPTS - 1:
                fleet.close()
                raise
    for child in fleet.processes().values():
        child.ask("disarm")
    fleet.refit()
    launched: dict[str, int] = {}
    for name, child in fleet.processes().items():
        seen = child.ask("disarm")
        offsets = [at for stage, at in seen if stage == "transfer"]  # type: ignore[attr-defined]
        launched[name] = max(offsets, default=0)
    return fleet, launched


def _columns(result: Result) -> tuple[object, ...]:
    at = f"@{result.offset}" if result.stage == "transfer" else ""
    return (
        result.transport,
        result.who,
        result.fault,
        result.stage + at,
        result.outcome,
        f"{result.seconds:.2f}",
        result.consistent,
        result.leaks,
        result.healed,
    )


def _row(columns: tuple[object, ...]) -> str:
    widths = (10, 13, 6, 16, 12, 5, 11, 6, 6)
    return " ".join(f"{c!s:<{w}}" for c, w in zip(columns, widths, strict=True)).rstrip()
