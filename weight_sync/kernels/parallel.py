"""Shares the tiles of one compiled CPU loop among threads (the loops release the GIL)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

# Starting threads costs about 0.1 ms, which one thread spends on a megabyte or so.
_WORTH_A_THREAD = 4 << 20


def in_threads(loop: Callable[[int, int], None], weight: NDArray[np.int64]) -> None:
    """Runs ``loop(first, last)`` over all tiles, cut to ranges of about equal weight.

    Uses as many threads as torch does, so ``OMP_NUM_THREADS`` and ``torch.set_num_threads`` hold.

    Args:
        loop: Compiled function of a half-open range of tiles.
        weight: int64 ``[tiles]``, bytes of each tile.
    """
    import torch

    total = int(weight.sum())
    threads = min(torch.get_num_threads(), total // _WORTH_A_THREAD, len(weight))
    if threads <= 1:
        loop(0, len(weight))
        return
    ends = np.searchsorted(np.cumsum(weight), np.arange(1, threads) * (total / threads))
    bounds = [0, *(int(e) for e in ends), len(weight)]
    with ThreadPoolExecutor(threads) as pool:
        parts = [pool.submit(loop, a, b) for a, b in pairwise(bounds)]
        for part in parts:
            part.result()
