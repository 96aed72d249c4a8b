"""Which version a trainer rank published, and how the refits of the last ones ended."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import DeadlineError, EngineStateError, RefitError, StaleEpochError

# Of so many versions it is known how their refits ended.
_KEPT = 8


@dataclass(frozen=True, eq=False)
class _End:
    """How a refit ended: an error, or nothing if it ended well; and the epoch it ran in."""

    error: str
    epoch: int


class Publication:
    """What the trainer's own thread promises to whoever reads its weights.

    Args:
        rank: For errors.
    """

    def __init__(self, rank: int) -> None:
        self.version = -1
        self._rank = rank
        self._epoch = -1
        self._ended: dict[int, _End] = {}
        self._closed = False
        self._changed = threading.Condition()

    def check(self, version: int) -> None:
        """Refuses versions that do not grow; one whose refit failed may be published again.

        Raises:
            EngineStateError: Naming both.
        """
        end = self._ended.get(version)
        if version < self.version or (end is not None and not end.error):
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

    def overtake(self, epoch: int) -> None:
        """Whoever waits in an earlier epoch was replaced."""
        with self._changed:
            self._epoch = epoch
            self._changed.notify_all()

    def end(self, version: int, epoch: int, error: str) -> None:
        """A refit ended; those of versions that were published before are history."""
        with self._changed:
            if version >= self.version:
                self._ended[version] = _End(error, epoch)
                self._ended = dict(sorted(self._ended.items())[-_KEPT:])
                self._changed.notify_all()

    def is_at(self, version: int) -> bool:
        """Whether :meth:`wait_for` would return at once."""
        with self._changed:
            return self.version == version and version not in self._ended

    def close(self) -> None:
        """Ends every wait: nothing is published any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineStateError(f"trainer {self._rank}: the endpoint was closed")

    def _require_latest(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise StaleEpochError(
                f"trainer {self._rank} was asked for a version in epoch {epoch}, but epoch "
                f"{self._epoch} began; whoever built that one drives the refits"
            )

    def _is_over(self, version: int, epoch: int) -> bool:
        """Whether the refit that waits in this epoch ended; a later one may try again."""
        end = self._ended.get(version)
        return end is not None and end.epoch >= epoch

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
            error = self._ended[version].error
            if error:
                raise RefitError(error, stage="release", version=version)

    def wait_for(self, version: int, epoch: int, deadline: Deadline) -> None:
        """Waits until ``version`` is published and promised not to change.

        Raises:
            RefitError: If it was superseded, or a refit of it ended; also if that happens while it
                is waited for, or did before that began, since nobody asks any more then.
            StaleEpochError: If a later epoch began.
            EngineStateError: If the endpoint was closed.
            DeadlineError: If it did not come in time.
        """
        with self._changed:
            self._require_latest(epoch)
            while self.version < version and not self._is_over(version, epoch):
                self._require_open()
                self._require_latest(epoch)
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
            if self.version < version:
                problem = f"the refit ended before trainer {self._rank} published {version}"
            elif self.version > version:
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
