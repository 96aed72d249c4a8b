"""The pure core imports neither torch nor anything that drives a device or an engine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PURE = ("layout", "manifest", "plan", "buckets", "membership", "recording", "program")
BANNED = ("torch", "cupy", "vllm", "ray")

# In a process of its own, since other tests have imported the banned modules into this one.
SCRIPT = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def imported_by(module: str) -> set[str]:
    """Top-level names in ``sys.modules`` after a fresh interpreter imported ``module``."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, module], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


@pytest.mark.parametrize("name", PURE)
def test_pure_module_imports_no_device_or_engine_library(name):
    banned = imported_by(f"weight_sync.{name}") & set(BANNED)
    assert not banned, f"weight_sync.{name} brings in {sorted(banned)}"


def test_the_ban_sees_a_banned_import():
    assert "torch" in imported_by("torch")
