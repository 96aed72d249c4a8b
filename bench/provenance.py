"""Where a figure comes from: the command, the day, and what it ran with."""

from __future__ import annotations

import platform
import shlex
import sys
from datetime import UTC, datetime

import torch


def provenance() -> dict[str, object]:
    """``command``, ``date`` and ``versions``, for the JSON object of a benchmark."""
    return {
        "command": "python -m bench " + shlex.join(sys.argv[1:]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    out = {"python": platform.python_version(), "torch": torch.__version__}
    vllm = sys.modules.get("vllm")
    if vllm is not None:
        out["vllm"] = vllm.__version__
    if torch.cuda.is_available():
        out["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        out["cuda"] = str(torch.version.cuda)
    return out
