"""Cuts a transfer into rounds, each of which fits into every worker's spare memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weight_sync.buckets import ALIGN
from weight_sync.errors import ConfigError
from weight_sync.plan import Plan
from weight_sync.transports.packed import cut_stream

I64 = NDArray[np.int64]

# A sender packs one bucket for every class of workers at once: buckets shrink with their number,
# but not below what the wire needs for its full rate.
_SMALLEST_BUCKET = 8 << 20


def stream_bucket_bytes(plan: Plan) -> int:
    """Bucket size of one reshard stream."""
    share = plan.bucket_bytes // len(plan.pieces)
    return max(share, min(plan.bucket_bytes, _SMALLEST_BUCKET))


def reshard_steps(plan: Plan, bucket_bytes: int) -> I64:
    """int64 ``[workers, steps]``: bytes that each worker receives in each step.

    In step ``k`` every sender sends bucket ``k`` of each of its streams.
    """
    units = plan.units
    rows: list[I64] = []
    for worker, c in enumerate(plan.worker_class):
        pieces = plan.pieces[c]
        item = pieces.nbytes // np.maximum(pieces.size.prod(axis=1), 1)
        total = np.zeros(0, np.int64)
        for rank in np.unique(plan.senders[worker]).tolist():
            mine = plan.sent(worker, rank)
            unit = units[pieces.tensor[mine]]
            nbytes = cut_stream(mine, pieces.size[mine], item[mine], unit, bucket_bytes).nbytes
            total = np.pad(total, (0, max(len(nbytes) - len(total), 0)))
            total[: len(nbytes)] += nbytes
        rows.append(total)
    steps = max(len(r) for r in rows)
    return np.stack([np.pad(r, (0, steps - len(r))) for r in rows])


def cut_rounds(kept: I64, budgets: Sequence[int], closed: NDArray[np.bool_]) -> tuple[int, ...]:
    """Chooses after which steps what has arrived is installed.

    One round, so that everything is staged and verified before generation pauses, if it fits.
    Otherwise each round takes half of a worker's memory, so that one arrives while the one before
    is installed.

    Args:
        kept: int64 ``[workers, steps]``, bytes each worker keeps of each step.
        budgets: Spare bytes per worker.
        closed: bool ``[steps]``, whether a round may end after the step.

    Returns:
        The end of each round, in steps; the last one is the number of steps.

    Raises:
        ConfigError: If some worker cannot hold even the smallest round.
    """
    steps = kept.shape[1]
    limit = np.asarray(budgets, np.int64)
    if (kept.sum(axis=1) <= limit).all():
        return (steps,)
    half = limit // 2
    ends: list[int] = []
    start, end = 0, 0
    filled = np.zeros(len(limit), np.int64)
    for step in range(steps):
        filled = filled + kept[:, step]
        if not closed[step]:
            continue
        if (filled > half).any() and end > start:
            ends.append(end)
            filled = kept[:, end : step + 1].sum(axis=1)
            start = end
        if (filled > half).any():
            worker = int((filled - half).argmax())
            raise ConfigError(
                f"worker {worker} has {int(limit[worker])} bytes to spare for staging but needs at "
                f"least {2 * int(filled[worker])}; lower gpu_memory_utilization, raise stage_bytes "
                "or use smaller buckets (bucket_bytes)"
            )
        end = step + 1
    return (*ends, steps)


def padded(nbytes: I64) -> I64:
    """Bytes that pieces take where each begins at a multiple of the alignment."""
    return -(-nbytes // ALIGN) * ALIGN
