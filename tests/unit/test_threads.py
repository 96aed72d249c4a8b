"""Threads kept for the next call: reused, never waited for, gone when nobody needs them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from weight_sync.threads import IDLE, Threads, beside

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def stock() -> Threads:
    return Threads()


def run(stock: Threads, name: str = "work") -> threading.Thread:
    """The thread that a piece of work ran on, once it is idle again."""
    seen: list[threading.Thread] = []
    stock.start(name, lambda: seen.append(threading.current_thread()))
    until(lambda: bool(seen) and seen[0].name == IDLE and len(stock._idle) > 0)
    return seen[0]


def until(true: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not true():
        pause.wait(0.005)


def test_the_thread_of_a_call_that_returned_is_used_again(stock: Threads) -> None:
    assert run(stock) is run(stock)


def test_a_call_that_is_stuck_holds_up_no_other(stock: Threads) -> None:
    free = threading.Event()
    stock.start("stuck", lambda: free.wait(20) and None)
    assert run(stock).name == IDLE
    free.set()


def test_a_thread_is_called_what_its_work_is_called(stock: Threads) -> None:
    run(stock)
    names: list[str] = []
    stock.start("second", lambda: names.append(threading.current_thread().name))
    until(lambda: bool(names))
    assert names == ["second"]


def test_a_thread_that_is_not_needed_ends() -> None:
    thread = run(Threads(idle_s=0.05))
    thread.join(10)
    assert not thread.is_alive()


def test_work_that_comes_when_threads_are_about_to_end_is_done() -> None:
    stock = Threads(idle_s=0.0005)
    done: list[int] = []
    pause = threading.Event()
    for number in range(300):
        stock.start("work", lambda number=number: done.append(number))  # type: ignore[misc]
        pause.wait(0.0005)
    until(lambda: len(done) == 300)
    assert sorted(done) == list(range(300))


def test_an_idle_thread_keeps_nothing_of_its_last_work_alive(stock: Threads) -> None:
    class Big:
        def work(self) -> None:
            return None

    big = Big()
    gone = weakref.ref(big)
    stock.start("work", big.work)
    del big
    until(lambda: gone() is None)


def test_what_runs_beside_hands_over_what_it_raised() -> None:
    def fail() -> None:
        raise ValueError("no")

    assert isinstance(beside("work", fail).exception(10), ValueError)


def test_an_error_that_nobody_reads_keeps_nothing_of_its_call_alive() -> None:
    class Held:
        pass

    def fail(held: Held) -> None:
        raise ValueError(str(held))

    def once() -> weakref.ref[Held]:
        held = Held()
        future = beside("work", partial(fail, held))
        until(future.done)
        return weakref.ref(held)

    gc.disable()
    try:
        gone = once()
        until(lambda: gone() is None)
    finally:
        gc.enable()


def test_a_forked_child_starts_threads_of_its_own() -> None:
    assert beside("before", lambda: None).result(10) is None
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            beside("in the child", lambda: os.write(write, b"ran") and None).result(10)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert pipe.read() == b"ran"
    os.waitpid(child, 0)


def test_neither_idle_nor_stuck_threads_keep_the_process() -> None:
    script = (
        "import threading; from weight_sync.threads import beside; "
        "beside('a', lambda: None).result(10); beside('b', lambda: threading.Event().wait(60))"
    )
    done = subprocess.run([sys.executable, "-c", script], timeout=20, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
