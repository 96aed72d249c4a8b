"""How NCCL work is launched: the library itself, grouped launches, and a gate against aborts.

NCCL groups belong to a thread, not to a communicator, and nothing is on a stream before the
outermost group ends. A communicator must also not be freed by an abort while another thread is
entering a call on it. Both rules are kept here.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from weight_sync.errors import EnvironmentUnsupportedError

#: How long an abort waits for a launch to leave NCCL, in seconds. A launch that takes longer is
#: stuck on a peer, and the abort is what releases it.
_LEAVE_SECONDS = 0.2


def nccl_library() -> Any:  # noqa: ANN401 (CuPy's compiled module has no types)
    """CuPy's binding of NCCL.

    Raises:
        EnvironmentUnsupportedError: CuPy is missing or was built without NCCL.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise EnvironmentUnsupportedError(
            f"CuPy with NCCL is needed to move weights between GPUs ({error}); install "
            "weight-sync with its cuda12 or cuda13 extra, or use the ipc transport"
        ) from error
    if not getattr(nccl, "available", False):
        raise EnvironmentUnsupportedError(
            "this CuPy was built without NCCL; install the wheel that matches the CUDA version"
        )
    return nccl


class LaunchGate:
    """Lets launches in until an abort closes it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._closed = False

    def enter(self) -> bool:
        """Begins a launch; ``False`` if the gate is closed."""
        with self._changed:
            if not self._closed:
                self._inside += 1
            return not self._closed

    def leave(self) -> None:
        """Ends a launch."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Lets nobody in any more and gives those inside a moment to leave."""
        with self._changed:
            self._closed = True
            self._changed.wait_for(lambda: self._inside == 0, _LEAVE_SECONDS)


class Launcher(Protocol):
    """A communicator that takes part in a grouped launch."""

    def launch_ended(self, failure: BaseException | None) -> None:
        """The outermost group of the thread has ended; work is on the stream, or failed."""


class LaunchGroup(threading.local):
    """The grouped launch that the calling thread is in, over all its communicators."""

    def __init__(self) -> None:
        self._depth = 0
        self._members: list[Launcher] = []
        self._failure: BaseException | None = None

    def start(self, member: Launcher) -> bool:
        """Begins or nests a group; ``True`` if ``member`` was not yet part of it."""
        if self._depth == 0:
            nccl_library().groupStart()
        self._depth += 1
        fresh = all(other is not member for other in self._members)
        if fresh:
            self._members.append(member)
        return fresh

    def fail(self, error: BaseException) -> None:
        """Notes that the group is incomplete: every member learns of it at its end."""
        self._failure = self._failure or error

    def end(self) -> None:
        """Ends one level; at the outermost one launches and tells every member how it went."""
        self._depth -= 1
        if self._depth:
            return
        members, self._members = self._members, []
        failure, self._failure = self._failure, None
        try:
            nccl_library().groupEnd()
        except Exception as error:  # CuPy raises KeyError for codes it does not know.
            failure = failure or error
        for member in members:
            member.launch_ended(failure)


#: One per thread; NCCL keeps its own state in the same way.
LAUNCHES = LaunchGroup()
