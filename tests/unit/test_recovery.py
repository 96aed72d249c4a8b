"""Who is missing after a failure, what the error says, and whether trying again makes sense."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import (
    AbortedError,
    DeadlineError,
    PeerDeadError,
    RefitError,
    TransportError,
    VerifyError,
)
from weight_sync.recovery import explain, fatal, shards_of, take_stock, worth_retrying
from weight_sync.rollcall import Missing, Vigil, roll_call
from weight_sync.wire.address import Address
from weight_sync.wire.server import Server

NOBODY = Missing()
ALIVE_S = 5.0
SHORT_S = 0.3


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server(lambda raw: raw)
    yield started
    started.close()


@pytest.fixture
def frozen(tmp_path: Path) -> Iterator[Address]:
    """An address that takes connections and never answers, as the kernel does for a stopped one."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    yield Address(f"tcp://127.0.0.1:{port}")
    context.destroy(linger=0)


def gone() -> Address:
    """Where a process listened that is dead."""
    server = Server(lambda raw: raw)
    server.close()
    return server.address


def error(kind: type[RefitError] = RefitError, **known: object) -> RefitError:
    return kind("no bytes came", stage="transfer", **known)  # type: ignore[arg-type]


# --- roll call ----------------------------------------------------------------------------------


def test_roll_call_tells_the_living_the_dead_and_the_frozen_apart(
    server: Server, frozen: Address
) -> None:
    found = roll_call({"a": server.address, "b": gone(), "c": frozen}, SHORT_S)
    assert found == Missing(frozenset({"b"}), frozenset({"c"}))


def test_roll_call_returns_as_soon_as_everybody_is_known(server: Server) -> None:
    start = time.monotonic()
    assert roll_call({"a": server.address, "b": gone()}, ALIVE_S).frozen == frozenset()
    assert time.monotonic() - start < ALIVE_S


def test_a_server_whose_threads_are_all_busy_answers_the_roll_call() -> None:
    release = threading.Event()

    def busy(raw: bytes) -> bytes:
        release.wait(ALIVE_S)
        return b""

    server = Server(busy, threads=1)
    try:
        tell = {"a": server.address}
        assert roll_call(tell, ALIVE_S, b"keeps the only thread busy") == NOBODY
        assert roll_call(tell, ALIVE_S) == NOBODY
    finally:
        release.set()
        server.close()


def test_roll_call_delivers_what_it_is_told_to_tell() -> None:
    heard = threading.Event()

    def hear(raw: bytes) -> bytes:
        if raw == b"stop":
            heard.set()
        return b""

    server = Server(hear)
    try:
        roll_call({"a": server.address}, ALIVE_S, b"stop")
        assert heard.wait(ALIVE_S)
    finally:
        server.close()


def test_vigil_ends_the_wait_when_somebody_freezes(server: Server, frozen: Address) -> None:
    deadline = Deadline(ALIVE_S)
    with Vigil(lambda: {"a": server.address, "b": frozen}, SHORT_S, deadline) as vigil:
        while not deadline.expired:
            time.sleep(0.01)
        assert vigil.frozen == {"b"}


def test_vigil_that_ends_early_accuses_nobody(frozen: Address) -> None:
    deadline = Deadline(ALIVE_S)
    with Vigil(lambda: {"b": frozen}, ALIVE_S, deadline) as vigil:
        pass
    assert vigil.frozen == frozenset()
    assert not deadline.expired


# --- stock --------------------------------------------------------------------------------------


def test_a_closed_address_of_an_earlier_epoch_proves_nothing(server: Server) -> None:
    controls = {"shard 0 worker 0": (gone(), 3), "shard 1 worker 0": (server.address, 4)}
    stock = take_stock({}, controls, 4, (), "test", SHORT_S)
    assert stock.missing == NOBODY
    assert stock.reached == {1}


def test_a_closed_address_of_this_epoch_is_a_death() -> None:
    stock = take_stock({}, {"shard 0 worker 0": (gone(), 4)}, 4, (), "test", SHORT_S)
    assert stock.missing.dead == {"shard 0 worker 0"}


def test_who_is_known_to_be_frozen_is_not_waited_for_again(frozen: Address) -> None:
    start = time.monotonic()
    stock = take_stock({"trainer 0": frozen}, {}, 1, {"trainer 0"}, "test", ALIVE_S)
    assert time.monotonic() - start < ALIVE_S
    assert stock.missing.frozen == {"trainer 0"}


def test_shards_of_names() -> None:
    assert shards_of(["shard 12 worker 3", "shard 2", "trainer 1"]) == {2, 12}


# --- retry --------------------------------------------------------------------------------------


def test_a_lost_shard_is_worth_a_retry() -> None:
    missing = Missing(dead=frozenset({"shard 1 worker 0"}))
    assert worth_retrying(error(), missing, {1})


def test_a_lost_connection_is_worth_a_retry() -> None:
    assert worth_retrying(error(PeerDeadError), NOBODY, ())
    assert worth_retrying(TransportError("the store is lost"), NOBODY, ())


@pytest.mark.parametrize("kind", [RefitError, VerifyError, DeadlineError, AbortedError])
def test_an_error_of_somebody_who_runs_is_not_retried(kind: type[RefitError]) -> None:
    assert not worth_retrying(error(kind), NOBODY, ())


def test_a_lost_trainer_is_never_retried() -> None:
    missing = Missing(frozen=frozenset({"trainer 1", "shard 0 worker 0"}))
    assert fatal(missing)
    assert not worth_retrying(error(PeerDeadError), missing, {0})


# --- messages -----------------------------------------------------------------------------------


def test_a_frozen_rank_is_named_with_stage_version_and_epoch() -> None:
    missing = Missing(frozen=frozenset({"shard 1 worker 0"}))
    original = error(DeadlineError, ranks=["shard 0 worker 1"])
    found = explain(original, missing, "commit", 7, 3, ())
    assert isinstance(found, DeadlineError)
    assert (found.stage, found.version, found.epoch) == ("transfer", 7, 3)
    assert found.ranks == ("shard 1 worker 0",)
    assert "frozen" in str(found)
    assert "replace_shard" in str(found)
    assert found.__cause__ is original


def test_dead_and_frozen_ranks_are_named_together() -> None:
    missing = Missing(frozenset({"shard 0 worker 0"}), frozenset({"trainer 1"}))
    found = explain(error(), missing, "transfer", 7, 3, ())
    assert isinstance(found, PeerDeadError)
    assert found.ranks == ("shard 0 worker 0", "trainer 1")
    assert "engines need no restart" in str(found)


def test_what_an_error_does_not_know_is_filled_in() -> None:
    found = explain(error(ranks=["trainer 0"]), NOBODY, "commit", 7, 3, ())
    assert isinstance(found, RefitError)
    assert (found.version, found.epoch, found.ranks) == (7, 3, ("trainer 0",))


def test_other_errors_of_the_library_get_a_note() -> None:
    found = explain(TransportError("no"), NOBODY, "connect", 7, 3, ())
    assert found.__notes__ == ["(stage=connect, version=7, epoch=3)"]


def test_a_lost_connection_to_somebody_who_runs_is_called_that() -> None:
    found = explain(error(PeerDeadError, ranks=["trainer 0"]), NOBODY, "connect", 7, 3, ())
    assert found.__notes__ == ["everybody who is known answers: only a connection was lost"]


def test_an_error_without_advice_says_what_became_of_the_engines() -> None:
    untouched = explain(error(RefitError), NOBODY, "publish", 7, 3, ())
    assert "nothing live was changed" in str(untouched)
    mixed = explain(error(RefitError), NOBODY, "transfer", 7, 3, {2, 0})
    assert "shards [0, 2] may hold mixed weights" in str(mixed)
