"""One request to several trainer ranks at once, each over a socket of its own."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import DeadlineError, PeerDeadError, RefitError
from weight_sync.failures import to_failure
from weight_sync.messages import Detach, Done, encode
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.trainer.round import ask_all
from weight_sync.wire.server import Server

pytestmark = pytest.mark.timeout(30)

Handler = Callable[[bytes], bytes]

QUESTION = Detach(1, "a question")


def done(_: bytes) -> bytes:
    return encode(Done())


@contextmanager
def ranks(*handlers: Handler) -> Iterator[tuple[list[Server], list[TrainerPeer]]]:
    """A server and a connection for each rank."""
    servers = [Server(handler) for handler in handlers]
    peers = [TrainerPeer(rank, server.address) for rank, server in enumerate(servers)]
    try:
        yield servers, peers
    finally:
        for peer in peers:
            peer.close()
        for server in servers:
            server.close()


def outcome(
    peers: list[TrainerPeer], seconds: float = 10.0
) -> tuple[list[int], dict[str, Exception]]:
    """Which ranks answered, and the errors of the others."""
    deadline = Deadline(seconds)
    with ask_all(peers, lambda _: QUESTION, Done, deadline, "publish", 3, 2) as asked:
        replies, errors = asked.outcome()
    return [peer.rank for peer in replies], dict(errors)


def test_every_rank_is_asked_before_any_answer_is_waited_for() -> None:
    together = threading.Barrier(3, timeout=10)

    def meet(request: bytes) -> bytes:
        together.wait()
        return done(request)

    with ranks(meet, meet, meet) as (_, peers):
        assert outcome(peers) == ([0, 1, 2], {})


def test_what_one_rank_reports_leaves_the_answers_of_the_others() -> None:
    def fail(_: bytes) -> bytes:
        return encode(to_failure(RefitError("no weights", stage="publish"), "publish"))

    with ranks(done, fail, done) as (_, peers):
        answered, errors = outcome(peers)
    assert answered == [0, 2]
    assert list(errors) == ["trainer 1"]
    error = errors["trainer 1"]
    assert isinstance(error, RefitError)
    assert (error.version, error.epoch, tuple(error.ranks)) == (3, 2, ("trainer 1",))
    assert "no weights" in str(error)


def test_a_silent_rank_is_late_and_the_others_are_heard() -> None:
    go = threading.Event()

    def stall(request: bytes) -> bytes:
        go.wait(20)
        return done(request)

    with ranks(stall, done) as (_, peers):
        try:
            answered, errors = outcome(peers, 0.3)
        finally:
            go.set()
    assert answered == [1]
    assert isinstance(errors["trainer 0"], DeadlineError)


def test_a_dead_rank_is_named_also_when_it_is_asked_again() -> None:
    with ranks(done, done) as (servers, peers):
        assert outcome(peers) == ([0, 1], {})
        servers[0].close()
        for _ in range(2):
            answered, errors = outcome(peers)
            assert answered == [1]
            assert isinstance(errors["trainer 0"], PeerDeadError)


def test_an_error_keeps_nothing_of_its_round() -> None:
    def fail(_: bytes) -> bytes:
        return encode(to_failure(RefitError("no weights", stage="publish"), "publish"))

    with ranks(fail, done) as (_, peers):
        gc.collect()
        gc.disable()
        try:
            with ask_all(peers, lambda _: QUESTION, Done, Deadline(10), "publish") as asked:
                _, errors = asked.outcome()
            held = weakref.ref(asked)
            assert list(errors) == ["trainer 0"]
            del asked, errors
            assert held() is None
        finally:
            gc.enable()


def test_a_round_that_is_given_up_leaves_connections_usable() -> None:
    go = threading.Event()
    numbers: list[int] = []

    def count(request: bytes) -> bytes:
        numbers.append(len(numbers))
        if len(numbers) == 1:
            go.wait(20)
        return done(request)

    with ranks(count) as (_, peers):
        given_up = ask_all(peers, lambda _: QUESTION, Done, Deadline(10), "publish")
        with pytest.raises(KeyError), given_up:
            raise KeyError("something else failed")
        go.set()
        # The late reply to the first request is not taken for that to the second.
        assert outcome(peers) == ([0], {})
    assert len(numbers) == 2
