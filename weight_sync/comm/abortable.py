"""What communicators have in common: who takes part, meeting, and one end for all of it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod

from weight_sync.comm.attendance import Attendance
from weight_sync.comm.deadline import Deadline
from weight_sync.errors import AbortedError, RefitError, TransportError


class Abortable(ABC):
    """A group that any thread may end, once.

    Args:
        attendance: This rank's presence in the group.
    """

    def __init__(self, attendance: Attendance) -> None:
        self.rank = attendance.rank
        self.world_size = len(attendance.names)
        self.epoch = attendance.epoch
        self._attendance = attendance
        self._abort_lock = threading.Lock()
        self._aborted: str | None = None

    @property
    def aborted(self) -> str | None:
        """Why the group was aborted, or ``None``."""
        return self._aborted

    def meet(self, stage: str, deadline: Deadline) -> None:
        """Waits for all ranks; see the protocol."""
        try:
            self._attendance.arrive(stage, deadline, interrupted=lambda: self._aborted)
        except (RefitError, TransportError) as error:
            if self._aborted is not None:
                raise AbortedError(self._aborted, stage=stage, epoch=self.epoch) from error
            self._end(str(error), error)
            raise

    def abort(self, reason: str) -> None:
        """Ends all work of the group; see the protocol."""
        self._end(reason, None)

    def _end(self, reason: str, cause: BaseException | None) -> None:
        """Aborts once; ``cause`` tells the peers on whom this rank gave up."""
        with self._abort_lock:
            if self._aborted is not None:
                return
            self._aborted = reason
            self._stop()
        self._attendance.leave(reason, cause)

    @abstractmethod
    def _stop(self) -> None:
        """Ends the work that is going on; called once, with the lock held."""
