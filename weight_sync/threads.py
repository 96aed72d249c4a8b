"""Threads for calls that may get stuck; those whose call returned are kept for the next one.

Starting a thread takes longer than most calls of a refit, and a new one has to set up again what
libraries keep per thread. Nobody waits for a thread here: a call that never returns keeps its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future

#: What threads without work are called; others are called what their work is called.
IDLE = "weight-sync-idle"

# A thread that was not needed for so long ends.
_IDLE_SECONDS = 60.0


class Threads:
    """Runs each piece of work at once, on an idle thread or else on a new one.

    Threads are daemons, so neither idle ones nor stuck ones keep the process alive. The work must
    leave what belongs to a thread (such as its current CUDA device) as it found it.

    Args:
        idle_s: How long a thread waits for more work before it ends, in seconds.
    """

    def __init__(self, idle_s: float = _IDLE_SECONDS) -> None:
        self._idle_s = idle_s
        self.forget()

    def forget(self) -> None:
        """Starts anew without threads; a forked child has none of its parent's."""
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Runs ``work`` on a thread of that name; returns at once.

        What it raises ends the thread, which is not kept, and is printed as for any thread.
        """
        with self._lock:
            # The one that worked last: its memory is most likely still in a cache.
            worker = self._idle.pop() if self._idle else None
        if worker is None:
            _Worker(self, name, work)
        else:
            worker.give(name, work)

    def _return(self, worker: _Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def _take_out(self, worker: _Worker) -> bool:
        """Whether the worker was idle, and now is nobody's."""
        with self._lock:
            if worker not in self._idle:
                return False
            self._idle.remove(worker)
            return True


class _Worker:
    """One thread, from its first piece of work on."""

    def __init__(self, home: Threads, name: str, work: Callable[[], None]) -> None:
        self._home = home
        self._work: Callable[[], None] | None = work
        self._given = threading.Lock()
        self._given.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def give(self, name: str, work: Callable[[], None]) -> None:
        """Hands over work; only to a worker that was taken out of the idle ones."""
        self._work = work
        self._thread.name = name
        self._given.release()

    def _run(self) -> None:
        home = self._home
        while True:
            work, self._work = self._work, None
            assert work is not None
            work()
            # What it refers to must not live until the next call.
            del work
            self._thread.name = IDLE
            home._return(self)
            while not self._given.acquire(timeout=home._idle_s):
                if home._take_out(self):
                    return


_shared = Threads()
os.register_at_fork(after_in_child=_shared.forget)

#: Runs work on the threads of this process.
start = _shared.start


def beside(name: str, work: Callable[[], None]) -> Future[None]:
    """Runs ``work`` on a thread of that name; the future gets its end, or what it raised."""
    future: Future[None] = Future()
    # Taken out before it gets an error: that keeps the frames it went through, so the future and
    # the frame below, with all that the call held, would keep each other.
    unset = [future]

    def run() -> None:
        try:
            work()
        except BaseException as error:  # Handed to whoever reads the future.
            unset.pop().set_exception(error)
        else:
            unset.pop().set_result(None)

    start(name, run)
    return future
