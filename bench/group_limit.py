"""The rate of plain large transfers between all trainer ranks and all engine workers at once.

It is what broadcast and reshard are held against, measured in their own run with the same library,
by processes of its own: one on the device of every rank and worker, which share out as many bytes
as the plan does but from one buffer into another, with nothing to pack, cut or look up.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch
from numpy.typing import NDArray

from bench.limits import Limit
from weight_sync.comm.base import Communicator
from weight_sync.comm.connect import connect
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.rendezvous import Rendezvous, RendezvousHost

_SECONDS = 120.0
# Launched together, so that waiting for the last one does not count for each.
_BATCH = 8
_WARM_UP = 2
_REPEAT = 9
# Payload of the worker that gets most, per launch: the rate was found to be flat from there on.
_CUDA_BYTES, _CPU_BYTES = 1 << 30, 32 << 20


@dataclass(frozen=True)
class Pattern:
    """Who gives how much to whom.

    Attributes:
        kind: ``send/recv`` or ``broadcast``.
        rows: Bytes; for sends one row per trainer rank with what each worker gets, for broadcasts
            one row per trainer rank with what it gives to everybody.
        payload: Bytes that all workers together need; of a broadcast they may keep only parts.
    """

    kind: str
    rows: tuple[tuple[int, ...], ...]
    payload: int

    def scaled(self, most: int) -> Pattern:
        """The same shares, so that the worker that gets most gets about ``most`` bytes."""
        table = np.array(self.rows, np.float64)
        factor = most / table.sum(axis=0).max()
        rows = tuple(tuple(int(np.ceil(n * factor)) for n in row) for row in self.rows)
        return Pattern(self.kind, rows, round(self.payload * factor))


def sends(sent: NDArray[np.int64]) -> Pattern:
    """All pairs at once.

    Args:
        sent: int64 ``[trainer ranks, workers]``, bytes.
    """
    return Pattern("send/recv", tuple(map(tuple, sent.tolist())), int(sent.sum()))


def broadcasts(given: NDArray[np.int64], payload: int) -> Pattern:
    """One root after the other.

    Args:
        given: int64 ``[trainer ranks]``, bytes that each broadcasts.
        payload: Bytes that all workers together keep.
    """
    return Pattern("broadcast", tuple((n,) for n in given.tolist()), payload)


def measure_groups(
    patterns: Sequence[Pattern], trainers: Sequence[str], workers: Sequence[str]
) -> list[Limit]:
    """Median payload rate per worker of each pattern.

    Args:
        patterns: Measured one after the other, in one group.
        trainers: Device of each trainer rank.
        workers: Device of each worker.

    Raises:
        TimeoutError: Naming a process that did not finish.
    """
    cuda = workers[0] != "cpu"
    scaled = [pattern.scaled(_CUDA_BYTES if cuda else _CPU_BYTES) for pattern in patterns]
    names = _names(len(trainers), len(workers))
    host = RendezvousHost("127.0.0.1", 1, "bench")
    context = multiprocessing.get_context("spawn")
    processes, pipes = [], []
    try:
        for rank, device in enumerate((*trainers, *workers)):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve,
                args=(host.rendezvous, rank, names, device, len(trainers), scaled, theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        answers = [_answer(name, pipe) for name, pipe in zip(names, pipes, strict=True)]
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(10)
        host.close()
    kind = "nccl" if cuda else "gloo"
    out = []
    for number, pattern in enumerate(scaled):
        # A batch is over when its last worker has everything.
        slowest = [max(batch) for batch in zip(*(a[number] for a in answers), strict=True)]
        timed = slowest[_WARM_UP:]
        took = statistics.median(timed) if cuda else min(timed)
        out.append(Limit(f"{kind} {pattern.kind}", pattern.payload / 1e9 / took / len(workers)))
    return out


def _names(trainers: int, workers: int) -> tuple[str, ...]:
    return (*(f"trainer {i}" for i in range(trainers)), *(f"worker {i}" for i in range(workers)))


def _answer(name: str, pipe: Connection) -> list[list[float]]:
    if not pipe.poll(_SECONDS):
        raise TimeoutError(f"{name} did not finish the measurement within {_SECONDS:g} s")
    answer = pipe.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _serve(
    rendezvous: Rendezvous,
    rank: int,
    names: tuple[str, ...],
    device: str,
    trainers: int,
    patterns: Sequence[Pattern],
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(_run(rendezvous, rank, names, torch.device(device), trainers, patterns))
    except Exception as error:  # Raised again by whoever measures.
        pipe.send(error)


def _run(
    rendezvous: Rendezvous,
    rank: int,
    names: tuple[str, ...],
    device: torch.device,
    trainers: int,
    patterns: Sequence[Pattern],
) -> list[list[float]]:
    """One participant; returns seconds per launch of every batch of every pattern."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    deadline = Deadline(_SECONDS)
    group = connect(rendezvous, rank, names, device, deadline)
    try:
        out = []
        for number, pattern in enumerate(patterns):
            buffers = _buffers(pattern, rank, trainers, device)
            group.meet(f"pattern {number}", deadline)
            seconds = []
            for _ in range(_WARM_UP + _REPEAT):
                start = time.perf_counter()
                for _ in range(_BATCH):
                    _launch(group, pattern, buffers, rank, trainers)
                group.synchronize(deadline)
                seconds.append((time.perf_counter() - start) / _BATCH)
            out.append(seconds)
        group.meet("end", deadline)
        return out
    finally:
        group.close()


def _buffers(
    pattern: Pattern, rank: int, trainers: int, device: torch.device
) -> list[torch.Tensor]:
    """What a participant sends from, per worker, or receives into, per trainer rank."""
    if pattern.kind == "broadcast":
        sizes = [row[0] for row in pattern.rows]
    elif rank < trainers:
        sizes = list(pattern.rows[rank])
    else:
        sizes = [row[rank - trainers] for row in pattern.rows]
    return [torch.zeros(n, dtype=torch.uint8, device=device) for n in sizes]


def _launch(
    group: Communicator,
    pattern: Pattern,
    buffers: Sequence[torch.Tensor],
    rank: int,
    trainers: int,
) -> None:
    if pattern.kind == "broadcast":
        for root, buffer in enumerate(buffers):
            if buffer.numel():
                group.broadcast(buffer, root)
        return
    with group.group():
        for peer, buffer in enumerate(buffers):
            if buffer.numel() and rank < trainers:
                group.send(buffer, trainers + peer)
            elif buffer.numel():
                group.recv(buffer, peer)
