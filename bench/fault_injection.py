"""Makes a process fail at a chosen place: in its own hook, or when another process reaches one.

Kinds: ``kill`` (SIGKILL), ``stop`` (SIGSTOP), ``raise``, ``close`` (every connection is shut down)
and ``slow`` (it sleeps, longer than a frozen process would be waited for).
"""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass

KINDS = ("kill", "stop", "raise", "close", "slow")
# Longer than the silence after which a participant counts as frozen: slow is not frozen.
SLOW_SECONDS = 1.5
# How long whoever pulled a trigger waits for the signal to have its effect.
_SIGNAL_SECONDS = 0.1


class InjectedError(Exception):
    """What a participant raises because the fault says so."""


@dataclass(frozen=True)
class Fault:
    """What happens, and when.

    Attributes:
        kind: One of ``KINDS``.
        stage: Name of the hook that sets it off.
        offset: Bytes that must have been launched before, for hooks that count.
        victim: Process that fails; 0 is the one whose hook it is.
    """

    kind: str
    stage: str
    offset: int = 0
    victim: int = 0


def shut_down_connections() -> None:
    """Shuts down every connection of this process; listeners and anonymous pairs stay.

    Descriptors stay open, so their numbers cannot be taken by something else meanwhile.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                listens = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                anonymous = connection.family == socket.AF_UNIX and not (
                    connection.getpeername() or connection.getsockname()
                )
                if not listens and not anonymous:
                    connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # Closed meanwhile, or not connected.


class Injector:
    """The ``FaultHook`` of one process; a fault happens once.

    Other processes set it off with SIGUSR1: the kind is what :meth:`expect` was told.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[str, int]] = []
        self._fault: Fault | None = None
        self._pending = ""
        self._expected = ""
        self._raise_at_once = False

    def arm(self, fault: Fault) -> None:
        """Waits for the hook of a fault."""
        self._fault = fault

    def disarm(self) -> list[tuple[str, int]]:
        """Forgets what did not happen; returns stages that began since, with their offsets."""
        self._fault, self._pending, self._expected = None, "", ""
        seen, self._seen = self._seen, []
        return seen

    def expect(self, kind: str, at_once: bool = False) -> None:
        """Fails in this way on SIGUSR1; must be called on the main thread.

        Args:
            kind: ``raise``, ``close`` or ``slow``.
            at_once: Raises or sleeps on the main thread, in whatever it does; otherwise in the next
                hook of this process.
        """
        self._expected, self._raise_at_once = kind, at_once
        signal.signal(signal.SIGUSR1, self._signalled)

    def _signalled(self, number: int, frame: object) -> None:
        kind, self._expected = self._expected, ""
        if kind == "close" or (kind and self._raise_at_once):
            _fail(kind, "signal")
        else:
            self._pending = kind

    def __call__(self, stage: str, offset: int = 0) -> None:
        """See :class:`weight_sync.faults.FaultHook`."""
        self._seen.append((stage, offset))
        if self._pending:
            kind, self._pending = self._pending, ""
            _fail(kind, stage)
        fault = self._fault
        if fault is None or fault.stage != stage or offset < fault.offset:
            return
        self._fault = None
        if not fault.victim:
            _fail(fault.kind, stage)
            return
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
        os.kill(fault.victim, signals.get(fault.kind, signal.SIGUSR1))
        time.sleep(_SIGNAL_SECONDS)


def _fail(kind: str, stage: str) -> None:
    match kind:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "raise":
            raise InjectedError(f"injected at {stage}")
        case "close":
            shut_down_connections()
        case "slow":
            time.sleep(SLOW_SECONDS)
        case _:
            raise ValueError(f"unknown kind {kind!r}; known: {', '.join(KINDS)}")
