"""The watchdog ends guarded work in time, once, for all groups, and leaves no thread behind."""

from __future__ import annotations

import threading
import time

import pytest

from weight_sync.comm.deadline import Deadline
from weight_sync.comm.watchdog import Watchdog
from weight_sync.errors import AbortedError, ConfigError


class Group:
    """A group whose work is a wait that only an abort ends."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.reasons: list[str] = []
        self.released = threading.Event()
        self.failure = failure

    def abort(self, reason: str) -> None:
        self.reasons.append(reason)
        if self.failure is not None:
            raise self.failure
        self.released.set()

    def work(self) -> None:
        assert self.released.wait(10), "nobody aborted this group"

    def __repr__(self) -> str:
        return "Group()"


def watchdog_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "watchdog"]


def guarded(watchdog: Watchdog, groups: list[Group], seconds: float) -> None:
    with watchdog.guard(groups, Deadline(seconds), "transfer"):
        groups[-1].work()


def test_work_past_its_deadline_is_aborted_and_says_so() -> None:
    group = Group()
    with pytest.raises(AbortedError, match=r"transfer took longer than its deadline of 0\.1 s"):
        guarded(Watchdog(), [group], 0.1)
    assert len(group.reasons) == 1


def test_work_in_time_is_left_alone() -> None:
    group = Group()
    with Watchdog().guard([group], Deadline(10), "transfer") as guard:
        pass
    assert (group.reasons, guard.fired) == ([], False)


def test_a_guard_without_deadline_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a deadline"), Watchdog().guard([], None, "x"):
        pytest.fail("the block must not run")


def test_an_exception_inside_aborts_the_groups_and_is_raised() -> None:
    group = Group()
    with pytest.raises(ValueError, match="bucket"), Watchdog().guard([group], Deadline(9), "pack"):
        raise ValueError("bucket 3")
    assert group.reasons == ["pack failed: bucket 3"]


def test_all_groups_of_all_guards_are_aborted_when_one_is_late() -> None:
    watchdog, patient, late = Watchdog(), Group(), Group()
    errors: list[BaseException] = []

    def other() -> None:
        try:
            guarded(watchdog, [patient], 30)
        except AbortedError as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(AbortedError):
        guarded(watchdog, [late], 0.2)
    thread.join(5)
    assert len(patient.reasons) == len(late.reasons) == len(errors) == 1


def test_a_group_that_cannot_be_aborted_does_not_strand_the_others() -> None:
    broken, good = Group(OSError("no such device")), Group()
    with pytest.raises(AbortedError, match="no such device"):
        guarded(Watchdog(), [broken, good], 0.1)
    assert good.released.is_set()


def test_a_group_whose_abort_hangs_does_not_delay_the_others() -> None:
    hanging, good = Group(), Group()
    release = threading.Event()
    hanging.abort = lambda reason: release.wait(10)  # type: ignore[method-assign,assignment]
    waited: list[float] = []

    def work() -> None:
        begin = time.monotonic()
        with Watchdog().guard([hanging, good], Deadline(0.1), "transfer"):
            good.work()
            waited.append(time.monotonic() - begin)
            release.set()

    with pytest.raises(AbortedError):
        work()
    assert waited[0] < 2


def test_the_thread_ends_when_nothing_is_guarded() -> None:
    before = len(watchdog_threads())
    watchdog = Watchdog()
    for _ in range(20):
        with watchdog.guard([], Deadline(10), "transfer"):
            assert len(watchdog_threads()) == before + 1
    end = Deadline(5)
    while len(watchdog_threads()) > before:
        end.check("the watchdog's end")
        time.sleep(0.005)


def test_the_thread_ends_after_it_has_fired() -> None:
    before = len(watchdog_threads())
    watchdog = Watchdog()
    with pytest.raises(AbortedError):
        guarded(watchdog, [Group()], 0.05)
    watchdog.close()
    assert len(watchdog_threads()) == before


def test_close_aborts_what_is_still_guarded() -> None:
    watchdog, group = Watchdog(), Group()
    timer = threading.Timer(0.1, watchdog.close)
    timer.start()
    with pytest.raises(AbortedError, match="watchdog was closed"):
        guarded(watchdog, [group], 30)
    timer.join()


def test_work_that_ends_as_its_deadline_passes_is_either_good_or_aborted_never_both() -> None:
    watchdog = Watchdog()
    raised = 0
    for step in range(200):
        group = Group()
        pause = 0.002 + (step % 7 - 3) * 0.0002
        try:
            with watchdog.guard([group], Deadline(0.002), "transfer") as guard:
                time.sleep(pause)
        except AbortedError:
            raised += 1
            assert (len(group.reasons), guard.fired) == (1, True)
        else:
            assert (group.reasons, guard.fired) == ([], False)
    assert raised > 0
