"""Who of a group has arrived, left or died: the same answer for gloo and NCCL groups.

Every rank leaves a note in the store when it aborts or closes; the store itself notes connections
that were lost. So a survivor can tell the rank that died from the ranks that gave up because of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from weight_sync.comm.deadline import Deadline
from weight_sync.comm.notes import closing_note, read_note, verdict, write_note
from weight_sync.comm.rendezvous import Rendezvous
from weight_sync.comm.store_client import StoreClient
from weight_sync.comm.store_server import DIED
from weight_sync.errors import (
    AbortedError,
    DeadlineError,
    MembershipError,
    PeerDeadError,
    RefitError,
    TransportError,
)

#: Longest wait between two looks at the local abort flag, in seconds.
_SLICE_SECONDS = 0.2

#: How long ranks that went away may take to say why, in seconds.
_NOTE_SECONDS = 1.0


class Attendance:
    """One rank's view of its group, through the rendezvous store.

    Args:
        rendezvous: Where the group meets.
        rank: This rank.
        names: Participants by rank, for messages, e.g. ``("trainer 0", "shard 0 worker 0")``.
        deadline: Until when to reach the store.

    Raises:
        MembershipError: ``rank`` has no name, or two ranks share one.
        DeadlineError: The store was not reached in time.
        TransportError: The store refused this process.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, names: Sequence[str], deadline: Deadline
    ) -> None:
        if not 0 <= rank < len(names) or len(set(names)) != len(names):
            raise MembershipError(
                f"rank {rank} does not fit the participants {list(names)}; "
                "give every rank of the group its own name, in rank order"
            )
        self.rank = rank
        self.names = tuple(names)
        self.epoch = rendezvous.epoch
        self._rendezvous = rendezvous
        self._visits: Counter[str] = Counter()
        self._left = False
        self._client = StoreClient(
            rendezvous.host, rendezvous.port, rendezvous.token, deadline, self._fate_key(rank)
        )
        self.local_address = self._client.local_address

    def arrive(
        self,
        stage: str,
        deadline: Deadline,
        payload: bytes = b"",
        *,
        interrupted: Callable[[], str | None] = lambda: None,
    ) -> list[bytes]:
        """Waits until every rank has arrived at ``stage`` as often as this one.

        Args:
            stage: Name of the meeting point.
            deadline: When to give up.
            payload: What the others get from this rank.
            interrupted: Looked at several times a second; a text ends the wait.

        Returns:
            The payloads of all ranks, in rank order.

        Raises:
            DeadlineError: Names the ranks that did not arrive.
            PeerDeadError: A rank died before all had arrived.
            AbortedError: A rank gave up before all had arrived, or ``interrupted`` said so.
            TransportError: The store is lost.
        """
        self._visits[stage] += 1
        visit = self._visits[stage]
        keys = [self._rendezvous.key(stage, visit, rank) for rank in range(len(self.names))]
        # Everyone who is here has read the previous meeting, so its keys need not pile up.
        previous = self._rendezvous.key(stage, visit - 2, self.rank) if visit > 2 else None
        self._client.put(keys[self.rank], payload, deadline, drop=previous)
        while True:
            found = self._client.wait(
                keys, deadline, seconds=_SLICE_SECONDS, unless=self._rendezvous.key("fate", "")
            )
            if all(key in found for key in keys):
                return [found[key] for key in keys]
            reason = interrupted()
            if reason is not None:
                raise AbortedError(reason, stage=stage, epoch=self.epoch)
            gone = self._gone_in(found)
            if gone:
                raise self.blame(gone, stage=stage)
            absent = [self.names[rank] for rank, key in enumerate(keys) if key not in found]
            deadline.check(stage, epoch=self.epoch, ranks=absent)

    def share(self, key: str, value: bytes, deadline: Deadline) -> None:
        """Stores a value for the other ranks of this group.

        Raises:
            TransportError: The store is lost.
        """
        self._client.put(self._rendezvous.key("shared", key), value, deadline)

    def fetch(self, key: str, owner: int, deadline: Deadline) -> bytes:
        """Waits for a value that rank ``owner`` shares.

        Raises:
            DeadlineError: It did not come; names the owner.
            PeerDeadError: A rank of the group died.
            AbortedError: A rank of the group gave up.
            TransportError: The store is lost.
        """
        full = self._rendezvous.key("shared", key)
        fates = self._rendezvous.key("fate", "")
        found = self._client.wait([full], deadline, unless=fates)
        if full in found:
            return found[full]
        gone = self._gone_in(found)
        if gone:
            raise self.blame(gone, stage="connect")
        raise DeadlineError(
            f"{self.names[owner]} did not publish its address within {deadline.seconds:g} s",
            stage="connect",
            epoch=self.epoch,
            ranks=[self.names[owner]],
        )

    def gone(self) -> list[int]:
        """Ranks that gave up or died so far, not those that are done; empty without a store."""
        fates = self._fates(range(len(self.names)), 0.0)
        return sorted(
            rank for rank, raw in fates.items() if raw == DIED or read_note(raw).kind != "closed"
        )

    def late(self, candidates: Iterable[int]) -> list[int]:
        """Those candidates that even now say nothing; all of them if every one has spoken.

        Called when a deadline has passed: ranks that wait as well note that they gave up, the
        rank they all wait for does not.
        """
        asked = sorted(set(candidates))
        spoken = self._fates(asked, _NOTE_SECONDS)
        return [rank for rank in asked if spoken.get(rank, DIED) == DIED] or asked

    def blame(
        self, suspects: Iterable[int], *, stage: str, version: int | None = None
    ) -> RefitError:
        """The error for ranks that are gone.

        It names the dead if there are any; else those whom the others gave up on; else the
        ranks that gave up for a reason of their own.
        """
        asked = sorted(set(suspects))
        fates = self._fates(asked, _NOTE_SECONDS)
        notes = {rank: read_note(raw) for rank, raw in fates.items() if raw != DIED}
        dead = [self.names[rank] for rank in asked if rank not in notes]
        if dead:
            reason = "the process is gone or its connection was lost"
            return PeerDeadError(reason, stage=stage, version=version, epoch=self.epoch, ranks=dead)
        told = "; ".join(f"{self.names[rank]}: {note.reason}" for rank, note in notes.items())
        error, ranks = verdict({self.names[rank]: note for rank, note in notes.items()})
        return error(
            f"a peer gave up ({told})",
            stage=stage,
            version=version,
            epoch=self.epoch,
            ranks=ranks,
        )

    def leave(self, reason: str, cause: BaseException | None = None) -> None:
        """Notes for the others why this rank is going; ends a call another thread is in."""
        self._note(write_note(reason, cause))

    def close(self) -> None:
        """Notes that this rank is done, unless it has left already, and closes the connection."""
        self._note(closing_note())
        self._client.close()

    def _note(self, note: bytes) -> None:
        if self._left:
            return
        self._left = True
        try:
            self._client.put(self._fate_key(self.rank), note, Deadline(_NOTE_SECONDS), once=True)
        except TransportError:
            # Either the store is lost and nobody can read notes, or a call of this process holds
            # the connection; the peers then learn from the closed connection.
            self._client.interrupt()

    def _fates(self, ranks: Iterable[int], seconds: float) -> dict[int, bytes]:
        """Notes of those ranks, after at most ``seconds``; empty when the store is lost."""
        keys = {self._fate_key(rank): rank for rank in ranks}
        try:
            found = self._client.wait(list(keys), Deadline(seconds))
        except TransportError:
            return {}
        return {keys[key]: note for key, note in found.items()}

    def _gone_in(self, found: dict[str, bytes]) -> list[int]:
        return [rank for rank in range(len(self.names)) if self._fate_key(rank) in found]

    def _fate_key(self, rank: int) -> str:
        return self._rendezvous.key("fate", rank)
