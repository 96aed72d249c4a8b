"""Calls over the wire: tagged replies, deadlines, dead peers, CURVE, nothing left behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import DeadlineError, PeerDeadError
from weight_sync.wire.client import Client
from weight_sync.wire.server import Server

pytestmark = pytest.mark.timeout(20)


@contextmanager
def serving(handler: Callable[[bytes], bytes], host: str | None = None) -> Iterator[Server]:
    server = Server(handler, host=host)
    try:
        yield server
    finally:
        server.close()


def call(client: Client, request: bytes, seconds: float = 10.0) -> bytes:
    return client.call(request, Deadline(seconds), "transfer", 3, 2)


def test_a_request_gets_its_own_reply() -> None:
    with serving(lambda request: request[::-1]) as server:
        client = Client(server.address, "trainer 0")
        assert [call(client, b) for b in (b"abc", b"", b"xy")] == [b"cba", b"", b"yx"]
        client.close()


def test_requests_of_two_clients_run_side_by_side() -> None:
    both = threading.Barrier(2, timeout=10)

    def meet(request: bytes) -> bytes:
        both.wait()
        return request

    with serving(meet) as server:
        clients = [Client(server.address, "trainer 0") for _ in range(2)]
        replies: list[bytes] = []
        threads = [
            threading.Thread(target=lambda c=c: replies.append(call(c, b"hello"))) for c in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert replies == [b"hello", b"hello"]
        for client in clients:
            client.close()


def test_a_silent_peer_is_a_deadline_error_that_names_it() -> None:
    release = threading.Event()

    def stall(request: bytes) -> bytes:
        release.wait(10)
        return request

    with serving(stall) as server:
        client = Client(server.address, "trainer 4")
        start = time.monotonic()
        with pytest.raises(DeadlineError) as failed:
            call(client, b"x", 0.2)
        assert time.monotonic() - start < 5
        assert failed.value.ranks == ("trainer 4",)
        assert (failed.value.stage, failed.value.version, failed.value.epoch) == ("transfer", 3, 2)
        release.set()
        client.close()


def test_a_late_reply_is_not_taken_for_the_next_one() -> None:
    release = threading.Event()

    def handler(request: bytes) -> bytes:
        if request == b"slow":
            release.wait(10)
        return request

    with serving(handler) as server:
        client = Client(server.address, "trainer 0")
        with pytest.raises(DeadlineError):
            call(client, b"slow", 0.2)
        release.set()
        assert [call(client, b) for b in (b"one", b"two")] == [b"one", b"two"]
        client.close()


def test_a_closed_peer_is_named_as_dead_before_the_deadline() -> None:
    with serving(lambda request: request) as server:
        client = Client(server.address, "trainer 1")
        call(client, b"x")
    start = time.monotonic()
    with pytest.raises(PeerDeadError) as failed:
        call(client, b"x", 15)
    assert time.monotonic() - start < 10
    assert failed.value.ranks == ("trainer 1",)
    client.close()


def test_tcp_needs_the_key_of_the_server() -> None:
    from weight_sync.wire.address import Address

    with serving(lambda request: request, host="127.0.0.1") as server:
        assert server.address.url.startswith("tcp://127.0.0.1:")
        right = Client(server.address, "trainer 0")
        assert call(right, b"x") == b"x"
        right.close()
        wrong = Client(Address(server.address.url), "trainer 0")
        with pytest.raises((DeadlineError, PeerDeadError)):
            call(wrong, b"x", 0.5)
        wrong.close()


def test_closing_a_server_takes_no_time_and_removes_its_socket() -> None:
    server = Server(lambda request: request)
    path = Path(server.address.url.removeprefix("ipc://"))
    assert path.exists()
    start = time.monotonic()
    server.close()
    server.close()
    assert time.monotonic() - start < 0.9
    assert not path.parent.exists()


def test_a_client_that_is_dropped_without_closing_does_not_hang_the_collector() -> None:
    """A context that is collected before its sockets would wait for them for ever."""
    with serving(lambda request: request) as server:
        ended = threading.Event()

        def drop() -> None:
            client = Client(server.address, "trainer 0")
            call(client, b"x")
            cycle: list[object] = [client]
            cycle.append(cycle)
            del client, cycle
            gc.collect()
            ended.set()

        threading.Thread(target=drop, daemon=True).start()
        assert ended.wait(10)


def test_requests_whose_callers_gave_up_waiting_do_not_hold_up_one_that_needs_no_wait() -> None:
    release = threading.Event()

    def handler(request: bytes) -> bytes:
        if request == b"wait":
            release.wait(10)
        return request

    server = Server(handler, waits=lambda request: request == b"wait")
    client = Client(server.address, "trainer 0")
    for _ in range(8):
        with pytest.raises(DeadlineError):
            call(client, b"wait", 0.05)
    assert call(client, b"quick", 2) == b"quick"
    release.set()
    client.close()
    server.close()


def test_what_is_answered_at_once_does_not_wait_for_busy_threads() -> None:
    release = threading.Event()

    def handler(request: bytes) -> bytes:
        release.wait(10)
        return request

    def at_once(request: bytes) -> bytes | None:
        return b"done" if request == b"note" else None

    server = Server(handler, threads=1, at_once=at_once)
    client = Client(server.address, "trainer 0")
    with pytest.raises(DeadlineError):
        call(client, b"work", 0.1)
    assert call(client, b"note", 5) == b"done"
    release.set()
    assert call(client, b"work") == b"work"
    client.close()
    server.close()


def test_requests_that_wait_run_side_by_side() -> None:
    everyone = threading.Barrier(16, timeout=10)

    def meet(request: bytes) -> bytes:
        everyone.wait()
        return request

    server = Server(meet, waits=lambda request: True)
    clients = [Client(server.address, "trainer 0") for _ in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(lambda c: call(c, b"x"), clients)) == [b"x"] * 16
    for client in clients:
        client.close()
    server.close()
