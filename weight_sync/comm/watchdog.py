"""Aborts all groups of a process when guarded work takes longer than it may.

The thread that moves bytes may be stuck in a native call, so another one must end it. It exists
only while something is guarded.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import AbortedError, ConfigError

#: How long a guard waits for its aborts before it reports them as unfinished, in seconds.
_ABORT_SECONDS = 10.0


class Abortable(Protocol):
    """Anything the watchdog can abort; a communicator or a transport."""

    def abort(self, reason: str) -> None:
        """Ends work in flight, from any thread, any number of times."""


class Guard:
    """One guarded piece of work.

    Attributes:
        what: What it does, for messages.
        failures: Errors of groups that could not be aborted.
    """

    def __init__(self, groups: Sequence[Abortable], deadline: Deadline, what: str) -> None:
        self.what = what
        self.failures: list[str] = []
        self.groups = tuple(groups)
        self.deadline = deadline
        self.reason: str | None = None
        self.aborts_done = threading.Event()

    @property
    def fired(self) -> bool:
        """Whether the watchdog aborted this work; final once the ``with`` block has ended."""
        return self.reason is not None


class Watchdog:
    """One per participant; its guards share a thread and their fate.

    When the deadline of one guard passes, the groups of all armed guards are aborted: a refit
    that lost one group cannot succeed, and its other groups must not wait for it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._armed: list[Guard] = []
        self._thread: threading.Thread | None = None

    @contextmanager
    def guard(
        self, groups: Sequence[Abortable], deadline: Deadline | None, what: str
    ) -> Iterator[Guard]:
        """Aborts ``groups`` if the block is not left before ``deadline``, or if it raises.

        Args:
            groups: What to abort.
            deadline: When; required, because nothing may wait for ever.
            what: Name of the work, used as the stage in messages, e.g. ``"transfer"``.

        Raises:
            ConfigError: ``deadline`` is ``None``.
            AbortedError: The watchdog fired, even if the block itself ended without an error.
        """
        if deadline is None:
            raise ConfigError(f"{what} needs a deadline: without one it could wait for ever")
        guard = Guard(groups, deadline, what)
        self._arm(guard)
        try:
            yield guard
        except BaseException as error:
            if self._disarm(guard):
                # Peers wait for the rest of this work; they must learn that it will not come.
                abort_all(guard.groups, f"{what} failed: {error}", guard.failures)
                raise
            raise self._aborted(guard) from error
        if not self._disarm(guard):
            raise self._aborted(guard)

    def close(self) -> None:
        """Aborts what is still guarded, as if its deadline had passed, and ends the thread."""
        with self._changed:
            thread = self._thread
            fired = self._take_all("the watchdog was closed")
            self._changed.notify_all()
        self._fire(fired)
        if thread is not None and thread is not threading.current_thread():
            thread.join(_ABORT_SECONDS)

    def _arm(self, guard: Guard) -> None:
        with self._changed:
            self._armed.append(guard)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _disarm(self, guard: Guard) -> bool:
        """Whether the work ended before the watchdog fired; the lock decides ties once."""
        with self._changed:
            if guard in self._armed:
                self._armed.remove(guard)
                self._changed.notify_all()
            return not guard.fired

    def _aborted(self, guard: Guard) -> AbortedError:
        finished = guard.aborts_done.wait(_ABORT_SECONDS)
        notes = [*guard.failures] if finished else ["aborts have not ended yet"]
        detail = f"; {'; '.join(notes)}" if notes else ""
        return AbortedError(f"{guard.reason}{detail}", stage=guard.what)

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._armed:
                    self._thread = None
                    return
                late = next((one for one in self._armed if one.deadline.expired), None)
                if late is None:
                    self._changed.wait(min(one.deadline.remaining() for one in self._armed))
                    continue
                fired = self._take_all(
                    f"{late.what} took longer than its deadline of {late.deadline.seconds:g} s"
                )
            self._fire(fired)

    def _take_all(self, reason: str) -> list[Guard]:
        """Marks every armed guard as fired; the caller holds the lock."""
        fired, self._armed = self._armed, []
        for guard in fired:
            guard.reason = reason
        return fired

    def _fire(self, fired: Sequence[Guard]) -> None:
        for guard in fired:
            abort_all(guard.groups, guard.reason or "", guard.failures)
            guard.aborts_done.set()


def abort_all(groups: Sequence[Abortable], reason: str, failures: list[str]) -> None:
    """Aborts every group, each on a thread of its own, so that no group waits for another.

    Args:
        groups: What to abort.
        reason: Given to each.
        failures: Receives one line for each group whose abort raised or did not end in time.
    """

    def one(group: Abortable) -> None:
        try:
            group.abort(reason)
        except Exception as error:
            failures.append(f"aborting {group!r} failed: {error}")

    threads = [threading.Thread(target=one, args=(g,), name="abort", daemon=True) for g in groups]
    for thread in threads:
        thread.start()
    end = Deadline(_ABORT_SECONDS)
    for thread, group in zip(threads, groups, strict=True):
        thread.join(end.remaining())
        if thread.is_alive():
            failures.append(f"aborting {group!r} did not end within {_ABORT_SECONDS:g} s")
