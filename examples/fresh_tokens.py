"""Greedy tokens of a checkpoint from an engine that never saw a refit.

Run as ``python fresh_tokens.py CHECKPOINT REQUEST OUTPUT``. It is a process of its own, so that
nothing of the live engine, in memory or in a cache, can reach it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from rollouts import Engine, prepare_environment

FRESH_DEADLINE_S = 240.0


class Request(msgspec.Struct, frozen=True):
    """Prompts to continue, each by ``tokens`` greedy tokens."""

    prompts: list[str]
    tokens: int


def fresh_tokens(checkpoint: Path, prompts: list[str], tokens: int) -> list[list[int]]:
    """Starts a fresh engine on ``checkpoint`` in a new process and returns its greedy tokens.

    Raises:
        subprocess.SubprocessError: The process failed or did not end within its deadline.
    """
    with tempfile.TemporaryDirectory(prefix="fresh-") as folder:
        request, output = Path(folder) / "request.json", Path(folder) / "output.json"
        request.write_bytes(msgspec.json.encode(Request(prompts, tokens)))
        subprocess.run(
            [sys.executable, __file__, str(checkpoint), str(request), str(output)],
            check=True,
            timeout=FRESH_DEADLINE_S,
        )
        return msgspec.json.decode(output.read_bytes(), type=list[list[int]])


if __name__ == "__main__":
    _checkpoint, _request, _output = map(Path, sys.argv[1:])
    prepare_environment()
    _asked = msgspec.json.decode(_request.read_bytes(), type=Request)
    _tokens = Engine(_checkpoint).greedy(_asked.prompts, _asked.tokens)
    _output.write_bytes(msgspec.json.encode(_tokens))
