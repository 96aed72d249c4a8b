"""Which version a trainer rank published, and how the refits of the last ones ended."""

from __future__ import annotations

import threading

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import DeadlineError, EngineStateError, RefitError

# Of so many versions it is known how their refits ended.
_KEPT = 8


class Publication:
    """What the trainer's own thread promises to whoever reads its weights.

    Args:
        rank: For errors.
    """

    def __init__(self, rank: int) -> None:
        self.version = -1
        self._rank = rank
        # An error, or nothing if it ended well.
        self._ended: dict[int, str] = {}
        self._closed = False
        self._changed = threading.Condition()

    def check(self, version: int) -> None:
        """Refuses versions that do not grow; one whose refit failed may be published again.

        Raises:
            EngineStateError: Naming both.
        """
        if version < self.version or self._ended.get(version) == "":
            raise EngineStateError(
                f"trainer {self._rank} already published version {self.version}; versions must "
                f"grow, {version} does not"
            )

    def publish(self, version: int) -> None:
        """From now on weights are at ``version``, until a refit of it ends."""
        with self._changed:
            self._ended.pop(version, None)
            self.version = version
            self._changed.notify_all()

    def end(self, version: int, error: str) -> None:
        """A refit ended; those of versions that were published before are history."""
        with self._changed:
            if version >= self.version:
                self._ended[version] = error
                self._ended = dict(sorted(self._ended.items())[-_KEPT:])
                self._changed.notify_all()

    def close(self) -> None:
        """Ends every wait: nothing is published any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineStateError(f"trainer {self._rank}: the endpoint was closed")

    def wait_end(self, version: int, epoch: int, deadline: Deadline) -> None:
        """Waits until a refit of ``version`` ended.

        Raises:
            RefitError: If it failed.
            EngineStateError: If a newer version was published meanwhile, or the endpoint closed.
            DeadlineError: If nobody ended it in time.
        """
        with self._changed:
            while version not in self._ended:
                self._require_open()
                if version < self.version:
                    raise EngineStateError(
                        f"trainer {self._rank} published version {self.version} before a refit of "
                        f"{version} ended; wait for the newer one"
                    )
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    raise DeadlineError(
                        f"trainer {self._rank} waited {deadline.seconds:g} s for the refit to end",
                        stage="release",
                        version=version,
                        epoch=epoch,
                        ranks=["orchestrator"],
                        remedy="check that whoever calls sync_weights() runs and did so",
                    )
            if self._ended[version]:
                raise RefitError(self._ended[version], stage="release", version=version)

    def wait_for(self, version: int, epoch: int, deadline: Deadline) -> None:
        """Waits until ``version`` is published and promised not to change.

        Raises:
            RefitError: If it was superseded, or a refit of it ended.
            EngineStateError: If the endpoint was closed.
            DeadlineError: If it did not come in time.
        """
        with self._changed:
            while self.version < version:
                self._require_open()
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    raise DeadlineError(
                        f"trainer {self._rank} is at version {self.version} and did not publish "
                        f"{version} within {deadline.seconds:g} s",
                        stage="publish",
                        version=version,
                        epoch=epoch,
                        ranks=[f"trainer {self._rank}"],
                        remedy="call publish() on every rank before or during sync_weights()",
                    )
            if self.version != version:
                problem = f"trainer {self._rank} is already at version {self.version}"
            elif version in self._ended:
                problem = (
                    f"a refit of version {version} ended before, so trainer {self._rank} may have "
                    "changed its weights since"
                )
            else:
                return
        raise RefitError(
            problem,
            stage="publish",
            version=version,
            epoch=epoch,
            ranks=[f"trainer {self._rank}"],
            remedy="call publish() on every rank again, then refit",
        )
