"""Real processes that play the ranks of a group; tests may kill or stop them at any time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil

from weight_sync.errors import RefitError, WeightSyncError

NAMES = ("trainer 0", "trainer 1", "shard 0 worker 0")


class Outcome(NamedTuple):
    """How the body of one rank ended: ``kind`` is ``"ok"`` or the name of the error's class."""

    kind: str
    value: Any
    ranks: tuple[str, ...]
    seconds: float


class RankProcesses:
    """Three rank processes, kept between tests and replaced when lost."""

    def __init__(self, patience: float) -> None:
        self._patience = patience
        # Forked from a server that has imported torch but never used it: replacing a lost process
        # then takes milliseconds, and none of them shares anything with the test process.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["weight_sync.comm.gloo"])
        self._ranks: dict[int, tuple[Any, Connection]] = {}

    def start(self, rank: int, body: Callable[..., Any], *args: object) -> None:
        """Runs ``body(*args)`` in the process of ``rank``."""
        self._refill()
        self._ranks[rank][1].send((body, args))

    def end(self, rank: int) -> Outcome:
        """Waits for the body of ``rank``, which must end within the patience of the test."""
        process, connection = self._ranks[rank]
        try:
            if not connection.poll(self._patience):
                raise AssertionError(f"rank {rank} is still busy after {self._patience} s")
            return connection.recv()
        except (AssertionError, OSError, EOFError) as error:
            process.join(1.0)
            self.close()  # One lost process must not fail the tests that follow.
            raise AssertionError(f"rank {rank} ended with {process.exitcode}: {error!r}") from error

    def run(self, world: int, body: Callable[..., Any], *args: object) -> list[Outcome]:
        """Runs ``body(rank, world, *args)`` on all ranks and waits for them."""
        for rank in range(world):
            self.start(rank, body, rank, world, *args)
        return [self.end(rank) for rank in range(world)]

    def pid(self, rank: int) -> int:
        """Process id of ``rank``."""
        self._refill()
        return self._ranks[rank][0].pid

    def lose(self, rank: int) -> None:
        """Kills the process of ``rank``, also if it is stopped or dead already."""
        process, connection = self._ranks.pop(rank)
        process.kill()
        process.join()
        connection.close()

    def _refill(self) -> None:
        """Replaces lost processes, all of them before any body runs, so deadlines start even."""
        fresh = [rank for rank in range(len(NAMES)) if rank not in self._ranks]
        for rank in fresh:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks[rank] = (process, ours)
        for rank in fresh:
            assert self._ranks[rank][1].recv() == "ready"

    def close(self) -> None:
        """Ends all processes."""
        for rank in list(self._ranks):
            self.lose(rank)


@contextmanager
def rank_processes(patience: float = 20.0) -> Iterator[RankProcesses]:
    """Rank processes that are gone afterwards; no body may take longer than ``patience`` s."""
    processes = RankProcesses(patience)
    try:
        yield processes
    finally:
        processes.close()


def die() -> None:
    """Ends this process as the kernel's memory killer would."""
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    """Stops this process; its connections stay open."""
    os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_death(pid: int) -> None:
    """Waits until the process has ended, whether or not its parent has noticed."""
    end = time.monotonic() + 10
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end, f"process {pid} did not die"
            time.sleep(0.01)


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        try:
            body, args = connection.recv()
        except EOFError:
            return
        begin = time.monotonic()
        try:
            kind, value, ranks = "ok", body(*args), ()
        except WeightSyncError as error:
            ranks = error.ranks if isinstance(error, RefitError) else ()
            kind, value = type(error).__name__, str(error)
        except BaseException as error:  # A body that fails its own check: the test must see it.
            kind, value, ranks = type(error).__name__, str(error), ()
        connection.send(Outcome(kind, value, ranks, time.monotonic() - begin))
