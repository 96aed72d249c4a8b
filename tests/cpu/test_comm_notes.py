"""Survivors of one fault report the rank that was lost, not each other."""

from __future__ import annotations

from weight_sync.comm.notes import Note, read_note, verdict, write_note
from weight_sync.errors import AbortedError, DeadlineError, PeerDeadError


def test_a_note_carries_on_whom_a_rank_gave_up() -> None:
    dead = PeerDeadError("gone", stage="transfer", ranks=["trainer 1"])
    late = DeadlineError("late", stage="transfer", ranks=["trainer 2"])
    assert read_note(write_note("a", dead)) == Note("a", "dead", ("trainer 1",))
    assert read_note(write_note("b", late)) == Note("b", "late", ("trainer 2",))


def test_a_reason_of_its_own_blames_nobody() -> None:
    assert read_note(write_note("out of memory", MemoryError())) == Note("out of memory")


def test_a_long_reason_is_cut() -> None:
    assert len(write_note("x" * 100_000, None)) < 2000


def test_a_note_that_cannot_be_read_is_still_a_reason() -> None:
    assert "cannot be read" in read_note(b"\xff\xff").reason


def test_the_dead_come_before_the_late_and_both_before_the_leavers() -> None:
    own = Note("out of memory")
    late = Note("waited", "late", ("c",))
    dead = Note("lost", "dead", ("d",))
    assert verdict({"a": own, "b": late, "e": dead}) == (PeerDeadError, ["d"])
    assert verdict({"a": own, "b": late}) == (DeadlineError, ["c"])
    assert verdict({"b": own, "a": own}) == (AbortedError, ["a", "b"])


def test_everyone_whom_somebody_blames_is_named_once() -> None:
    notes = {"a": Note("x", "late", ("c", "d")), "b": Note("y", "late", ("d",))}
    assert verdict(notes) == (DeadlineError, ["c", "d"])
