"""What a rank leaves in the store when it goes: why, and on whom it gave up.

When one rank is lost the others give up one after the other. Each passes on whom it blames, so that
all of them report the rank that was lost and not the survivor that happened to be first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from weight_sync.errors import AbortedError, DeadlineError, PeerDeadError, RefitError

#: Longest reason that is kept, in characters.
_REASON_LIMIT = 1000


class Note(msgspec.Struct, frozen=True):
    """Why a rank left.

    Attributes:
        reason: In words.
        kind: ``"dead"`` or ``"late"`` if it left because of the ``blamed``, ``"closed"`` if it was
            done with the group, else ``"own"``.
        blamed: Participants that were dead or late.
    """

    reason: str
    kind: Literal["own", "dead", "late", "closed"] = "own"
    blamed: tuple[str, ...] = ()


def write_note(reason: str, cause: BaseException | None) -> bytes:
    """Encodes a note; ``cause`` is the error that made the rank leave, if there was one."""
    kind: Literal["own", "dead", "late"] = "own"
    if isinstance(cause, PeerDeadError):
        kind = "dead"
    elif isinstance(cause, DeadlineError):
        kind = "late"
    blamed = cause.ranks if isinstance(cause, RefitError) and kind != "own" else ()
    return msgspec.msgpack.encode(Note(reason[:_REASON_LIMIT], kind, blamed))


def closing_note() -> bytes:
    """Encodes the note of a rank that is done with the group."""
    return msgspec.msgpack.encode(Note("closed the group", "closed"))


def read_note(raw: bytes) -> Note:
    """Decodes a note; one that cannot be read counts as a reason of the rank's own."""
    try:
        return msgspec.msgpack.decode(raw, type=Note)
    except msgspec.MsgspecError as error:
        return Note(f"left a note that cannot be read ({error})")


def verdict(notes: Mapping[str, Note]) -> tuple[type[RefitError], list[str]]:
    """What notes by rank name mean together: the class of the error and the ranks at fault.

    The dead come before the late, and both before the ranks that left for a reason of their own.
    """
    errors: dict[str, type[RefitError]] = {"dead": PeerDeadError, "late": DeadlineError}
    for kind, error in errors.items():
        blamed = {name for note in notes.values() if note.kind == kind for name in note.blamed}
        if blamed:
            return error, sorted(blamed)
    return AbortedError, sorted(notes)
