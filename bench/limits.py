"""The rate a path allows, measured in the run whose results are held against it."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

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


def traffic(plan: Plan) -> NDArray[np.int64]:
    """int64 ``[trainer ranks, workers]``: bytes that each worker needs from each rank."""
    ranks = plan.membership.trainer_world_size
    return np.stack(
        [
            np.bincount(plan.senders[worker], plan.pieces[c].nbytes, ranks).astype(np.int64)
            for worker, c in enumerate(plan.worker_class)
        ],
        axis=1,
    )


def measure_copies(
    sent: NDArray[np.int64], trainers: Sequence[str], workers: Sequence[str]
) -> Limit:
    """Rate per worker at which all workers could get their bytes if every path ran at its own rate.

    Each path is measured alone. What lies on a worker's own GPU and what comes from its peers use
    different wires, so they arrive at once; a GPU has one link into which all its peers send, and
    one through which it sends to all of them.

    Args:
        sent: int64 ``[trainer ranks, workers]``, as :func:`traffic`.
        trainers: Device of each trainer rank.
        workers: Device of each worker.
    """
    rates: dict[tuple[str, str], Limit] = {}
    for rank, worker in np.argwhere(sent).tolist():
        path = trainers[rank], workers[worker]
        if path not in rates:
            rates[path] = measure(workers[worker], trainers[rank])
    kind = " and ".join(sorted({limit.kind for limit in rates.values()}))
    gbps = {path: limit.gbps for path, limit in rates.items()}
    return Limit(kind, float(sent.sum()) / busiest(sent, trainers, workers, gbps) / len(workers))


def busiest(
    sent: NDArray[np.int64],
    trainers: Sequence[str],
    workers: Sequence[str],
    rates: Mapping[tuple[str, str], float],
) -> float:
    """Bytes over rate of whatever takes longest.

    Args:
        sent: int64 ``[trainer ranks, workers]``.
        trainers: Device of each trainer rank.
        workers: Device of each worker.
        rates: Rate of each path from a trainer's device to a worker's.
    """
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for rank, worker in np.argwhere(sent).tolist():
        source, target = trainers[rank], workers[worker]
        seconds = int(sent[rank, worker]) / rates[source, target]
        if source != target:
            spent["out of", source] += seconds
            spent["into", target] += seconds
        elif target == "cpu":
            # Workers copy on cores of their own.
            spent["worker", str(worker)] += seconds
        else:
            spent["inside", target] += seconds
    return max(spent.values())
