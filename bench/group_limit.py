"""The rate of plain large sends through a group of trainer ranks and one engine worker.

It is what broadcast and reshard are held against, measured in their own run with the same library.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from bench.limits import Limit
from weight_sync.comm.connect import connect
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.rendezvous import Rendezvous, RendezvousHost

if TYPE_CHECKING:
    from bench.trainer_process import TrainerProcesses

_SECONDS = 60.0
# Sends that are launched together, so that waiting for the last one does not count for each.
_BATCH = 8
_ENGINE = "engine"


def _names(ranks: int) -> tuple[str, ...]:
    return (*(f"trainer {rank}" for rank in range(ranks)), _ENGINE)


def send_flat(
    rendezvous: Rendezvous,
    rank: int,
    ranks: int,
    device: torch.device,
    nbytes: int,
    count: int,
) -> None:
    """A trainer rank's part: sends ``nbytes`` to the engine ``count`` times."""
    deadline = Deadline(_SECONDS)
    group = connect(rendezvous, rank, _names(ranks), device, deadline)
    try:
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        for _ in range(count):
            group.send(buffer, ranks)
        group.synchronize(deadline)
        group.meet("flat", deadline)
    finally:
        group.close()


def measure_group(
    trainers: TrainerProcesses, devices: Sequence[str], engine: str, repeat: int = 9
) -> Limit:
    """Median rate at which the engine's device receives from all trainer ranks at once.

    Args:
        trainers: Running trainer processes.
        devices: Their devices, in rank order.
        engine: Engine device; this process receives.
        repeat: Timed batches after two warm-ups.
    """
    device = torch.device(engine)
    cuda = device.type == "cuda"
    ranks = len(devices)
    # As much per rank as keeps the total at the size whose rate was found to be flat.
    nbytes = (1 << 30 if cuda else 64 << 20) // ranks
    deadline = Deadline(_SECONDS)
    host = RendezvousHost("127.0.0.1", 1, "bench")
    try:
        trainers.post("send_flat", host.rendezvous, nbytes, (repeat + 2) * _BATCH)
        group = connect(host.rendezvous, ranks, _names(ranks), device, deadline)
        buffers = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in devices]
        if cuda:
            torch.cuda.synchronize(device)
        seconds = []
        for _ in range(repeat + 2):
            start = time.perf_counter()
            for _ in range(_BATCH):
                with group.group():
                    for rank, buffer in enumerate(buffers):
                        group.recv(buffer, rank)
            group.synchronize(deadline)
            seconds.append((time.perf_counter() - start) / _BATCH)
        group.meet("flat", deadline)
        group.close()
        trainers.collect(_SECONDS)
    finally:
        host.close()
    timed = seconds[2:]
    took = statistics.median(timed) if cuda else min(timed)
    kind = "nccl send/recv" if cuda else "gloo send/recv"
    return Limit(kind, nbytes * ranks / 1e9 / took)
