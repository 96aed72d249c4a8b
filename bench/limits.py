"""The rate a path allows, measured in the run whose results are held against it."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from weight_sync.plan import Plan


@dataclass(frozen=True)
class Limit:
    """Payload rate of a plain large copy over the same path.

    Attributes:
        kind: ``memory copy``, ``device copy`` or ``peer copy``, or several at once.
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


def measure_plan(plan: Plan, trainers: Sequence[str], engines: Sequence[str]) -> Limit:
    """Rate at which the slowest worker could get its bytes, each over the path the plan gives it.

    What lies on the worker's own GPU and what comes from its peers use different wires, so they
    arrive at once; all peers share the worker's own link.

    Args:
        plan: Who reads how much from whom.
        trainers: Device of each trainer rank.
        engines: Device of each worker.
    """
    rates: dict[tuple[str, str], Limit] = {}
    slowest: Limit | None = None
    for worker, engine in enumerate(engines):
        program = plan.receiver_program(worker)
        elements = program.size.unpack().astype(np.int64).prod(axis=1)
        sent = np.bincount(program.sender.unpack(), weights=elements, minlength=len(trainers))
        parts: dict[str, float] = defaultdict(float)
        kinds = []
        for trainer, amount in zip(trainers, sent.tolist(), strict=True):
            if not amount:
                continue
            if (engine, trainer) not in rates:
                rates[engine, trainer] = measure(engine, trainer)
            path = rates[engine, trainer]
            kinds.append(path.kind)
            parts[path.kind] += amount / path.gbps
        kind = " and ".join(sorted(set(kinds)))
        limit = Limit(kind, float(sent.sum()) / max(parts.values()))
        if slowest is None or limit.gbps < slowest.gbps:
            slowest = limit
    assert slowest is not None
    return slowest
