"""Runs a native call that takes no deadline of its own, and gives up on it in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from weight_sync.comm.deadline import Deadline

T = TypeVar("T")

#: Time between two looks at whether to go on, in seconds.
_LOOK_SECONDS = 0.1


class BoundedCall(Generic[T]):
    """One call on a daemon thread.

    A native call cannot be stopped from outside. When its time is over the caller goes on without
    it; the thread ends as soon as the call returns, and what it returned is discarded.

    Args:
        call: What to run.
        discard: Frees the result if it comes after the caller gave up.
        name: Name of the thread.
    """

    def __init__(self, call: Callable[[], T], discard: Callable[[T], None], name: str) -> None:
        self._call = call
        self._discard = discard
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._given_up = False
        self._results: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def wait(self, deadline: Deadline, look: Callable[[], None]) -> bool:
        """Waits for the call; whether it returned before the deadline.

        Args:
            deadline: When to give up.
            look: Called several times a second; what it raises ends the wait.

        Raises:
            BaseException: What the call raised, or what ``look`` raised.
        """
        try:
            while not self._done.wait(min(_LOOK_SECONDS, deadline.remaining())):
                look()
                if deadline.expired:
                    break
        finally:
            with self._lock:
                self._given_up = not self._done.is_set()
                error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                # Or this frame and the error hold each other, and with them what the call used.
                del error
        return bool(self._results)

    @property
    def result(self) -> T:
        """What the call returned; only after :meth:`wait` said that it did."""
        return self._results[0]

    def _run(self) -> None:
        try:
            value = self._call()
        except BaseException as error:  # Re-raised on the thread that waits.
            with self._lock:
                if not self._given_up:
                    self._error = error
                self._done.set()
            return
        with self._lock:
            late = self._given_up
            if not late:
                self._results.append(value)
                self._done.set()
        if late:
            self._discard(value)
