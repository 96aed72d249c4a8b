"""``python -m weight_sync doctor``: what works on this machine, and the way out where not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TextIO

from weight_sync import environment, environment_cuda
from weight_sync.environment import Finding

CHECKS: tuple[Callable[[], list[Finding]], ...] = (
    environment.software,
    environment.identity,
    environment_cuda.devices,
    environment_cuda.libraries,
    environment_cuda.peers,
    environment_cuda.memory,
    environment.settings,
    environment.shared_memory,
    environment.limits,
    environment.sockets,
)


def findings() -> Iterator[Finding]:
    """Runs every check in turn; one that breaks is a finding itself."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:  # A doctor reports what it meets.
            text = f"the check broke: {type(error).__name__}: {error}"
            yield Finding(check.__name__, "fail", text, "report this with the output above")


def report(found: Iterator[Finding], out: TextIO = sys.stdout) -> int:
    """Prints findings as they come.

    Args:
        found: What was found.
        out: Where to.

    Returns:
        Exit code: 1 if something fails, else 0.
    """
    failed = 0
    for finding in found:
        print(f"{finding.level:<4}  {finding.name}: {finding.text}", file=out, flush=True)
        if finding.remedy:
            print(f"      -> {finding.remedy}", file=out, flush=True)
        failed += finding.level == "fail"
    return 1 if failed else 0
