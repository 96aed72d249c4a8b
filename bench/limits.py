"""The rate a path allows, measured in the run whose results are held against it."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Limit:
    """Payload rate of a plain large copy over the same path.

    Attributes:
        kind: ``memory copy``, ``device copy`` or ``peer copy``.
        gbps: GB/s of payload (1e9 bytes per second).
    """

    kind: str
    gbps: float


def measure(engine: str, trainer: str, repeat: int = 9) -> Limit:
    """Median copy rate from the trainer's device to the engine's.

    Args:
        engine: Engine device, e.g. ``"cuda:0"``.
        trainer: Trainer device.
        repeat: Timed copies after two warm-ups.
    """
    cuda = engine.startswith("cuda")
    nbytes = (4 << 30) if cuda else (256 << 20)
    src = torch.empty(nbytes, dtype=torch.uint8, device=trainer).random_(0, 255)
    dst = torch.empty(nbytes, dtype=torch.uint8, device=engine)
    seconds = []
    for _ in range(repeat + 2):
        if cuda:
            torch.cuda.synchronize(torch.device(engine))
        start = time.perf_counter()
        dst.copy_(src)
        if cuda:
            torch.cuda.synchronize(torch.device(engine))
        seconds.append(time.perf_counter() - start)
    kind = "memory copy" if not cuda else "device copy" if engine == trainer else "peer copy"
    del src, dst
    if cuda:
        torch.cuda.empty_cache()
    best = statistics.median(seconds[2:]) if cuda else min(seconds[2:])
    return Limit(kind, nbytes / 1e9 / best)
