"""Lets gloo exchange its addresses through the rendezvous of this library."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import Store

from weight_sync.comm.attendance import Attendance
from weight_sync.comm.deadline import Deadline


class GlooStore(Store):
    """The part of a torch store that gloo uses while its ranks connect to each other.

    Gloo names keys ``context/rank`` after the rank that publishes them, so a wait that fails can
    say for whom.
    """

    def __init__(self, attendance: Attendance, deadline: Deadline) -> None:
        super().__init__()
        self._attendance = attendance
        self._deadline = deadline

    def set(self, key: str, value: bytes | str) -> None:
        """Publishes this rank's address."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._attendance.share(key, raw, self._deadline)

    def get(self, key: str) -> bytes:
        """Waits for a peer's address; ends early when a rank of the group died or gave up."""
        return self._attendance.fetch(key, int(key.rsplit("/", 1)[-1]), self._deadline)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Waits for all keys; the deadline of the whole connection counts, not ``timeout``."""
        for key in keys:
            self.get(key)
