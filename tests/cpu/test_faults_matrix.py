"""A sample of the fault matrix, and rebuilds in a row, as ``python -m bench faults`` runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.fault_cells import STAGES, TRANSPORTS, WHO, all_cells
from bench.fault_injection import KINDS
from bench.faults import REBUILDS, SUBSET, subset

ROOT = Path(__file__).parents[2]
# On a shared machine processes are scheduled late; the library's own deadline is not longer.
LATE = 2.0
# A leaked group holds a copy of the weights on each side: 20 of them would be ten times this.
RESIDENT_KIB = 16 << 10

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def faults(only: str, folder: Path) -> dict[str, object]:
    """The JSON of a run in a process of its own, which forks all others."""
    out = folder / "faults.json"
    subprocess.run(
        [sys.executable, "-m", "bench", "faults", "--only", only, "--json", str(out)],
        cwd=ROOT,
        check=True,
        timeout=380,
        stdout=subprocess.DEVNULL,
    )
    return json.loads(out.read_text())


def test_every_cell_of_the_sample_ends_well(tmp_path: Path) -> None:
    found = faults(SUBSET, tmp_path)["cells"]
    assert len(found) == len(subset())
    wrong = [
        cell
        for cell in found
        if cell["outcome"] not in ("recovered", "named_error")
        or cell["seconds"] > LATE * cell["deadline_s"]
        or not cell["consistent"]
        or not cell["healed"]
        or cell["leaks"]
    ]
    assert wrong == []


def test_twenty_rebuilds_in_a_row_leave_nothing_behind(tmp_path: Path) -> None:
    found = faults(REBUILDS, tmp_path)["rebuilds"]
    assert [r["transport"] for r in found] == list(TRANSPORTS)
    for rebuilds in found:
        assert (rebuilds["rebuilds"], rebuilds["failed_refits"]) == (20, 10)
        assert rebuilds["leaked"] == []
        assert rebuilds["resident_growth_kib"] < RESIDENT_KIB


def test_the_sample_has_every_kind_everybody_and_every_stage() -> None:
    cells = subset()
    assert {cell.fault for cell in cells} == set(KINDS)
    assert {cell.who for cell in cells} == set(WHO)
    assert {cell.stage for cell in cells} == set(STAGES)
    assert {cell.transport for cell in cells} == set(TRANSPORTS)


def test_the_matrix_is_complete() -> None:
    cells = list(all_cells())
    stages = len(STAGES) + 2  # Transfers stop at three places.
    assert len({cell.name for cell in cells}) == len(TRANSPORTS) * len(WHO) * stages * len(KINDS)
