"""The rendezvous store: what it keeps, what it refuses, and what it notices."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weight_sync.comm.deadline import Deadline
from weight_sync.comm.store_client import StoreClient
from weight_sync.comm.store_server import DIED, StoreServer
from weight_sync.comm.store_wire import (
    HEADER_BYTES,
    MAX_FRAME,
    Hello,
    Put,
    body_length,
    decode_request,
    frame,
)
from weight_sync.errors import TransportError

TOKEN = "correct"


@pytest.fixture
def server() -> Iterator[StoreServer]:
    with closing(StoreServer("127.0.0.1", TOKEN)) as server:
        yield server


def client(server: StoreServer, fate_key: str | None = None) -> StoreClient:
    return StoreClient(server.host, server.port, TOKEN, Deadline(5), fate_key)


def test_a_value_put_by_one_client_is_found_by_another(server: StoreServer) -> None:
    with closing(client(server)) as one, closing(client(server)) as other:
        one.put("a", b"\x00\xff", Deadline(5))
        assert other.wait(["a"], Deadline(5)) == {"a": b"\x00\xff"}


def test_a_wait_ends_as_soon_as_the_last_key_is_there(server: StoreServer) -> None:
    with closing(client(server)) as one, closing(client(server)) as other:
        one.put("a", b"1", Deadline(5))
        timer = threading.Timer(0.2, one.put, ["b", b"2", Deadline(5)])
        timer.start()
        begin = time.monotonic()
        assert other.wait(["a", "b"], Deadline(10)) == {"a": b"1", "b": b"2"}
        assert 0.1 < time.monotonic() - begin < 3
        timer.join()


def test_a_wait_past_its_deadline_answers_with_what_is_there(server: StoreServer) -> None:
    with closing(client(server)) as one:
        one.put("a", b"1", Deadline(5))
        assert one.wait(["a", "b"], Deadline(0.2)) == {"a": b"1"}


def test_a_key_under_the_unless_prefix_ends_a_wait(server: StoreServer) -> None:
    with closing(client(server)) as one:
        one.put("fate/2", b"x", Deadline(5))
        found = one.wait(["never"], Deadline(10), unless="fate/")
        assert found == {"fate/2": b"x"}


def test_put_once_keeps_the_first_value(server: StoreServer) -> None:
    with closing(client(server)) as one:
        one.put("a", b"first", Deadline(5), once=True)
        one.put("a", b"second", Deadline(5), once=True)
        assert one.wait(["a"], Deadline(5)) == {"a": b"first"}


def test_put_forgets_the_key_to_drop(server: StoreServer) -> None:
    with closing(client(server)) as one:
        one.put("a", b"1", Deadline(5))
        one.put("b", b"2", Deadline(5), drop="a")
        assert one.wait(["a", "b"], Deadline(0.1)) == {"b": b"2"}


def test_a_lost_connection_is_noted_even_while_it_waits(server: StoreServer) -> None:
    with closing(client(server)) as one:
        lost = client(server, fate_key="fate/1")

        def wait() -> None:
            with pytest.raises(TransportError):
                lost.wait(["never"], Deadline(10))

        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(0.1)
        lost.interrupt()
        waiter.join(5)
        lost.close()
        assert one.wait(["fate/1"], Deadline(5)) == {"fate/1": DIED}


def test_a_note_left_before_the_connection_ends_is_kept(server: StoreServer) -> None:
    with closing(client(server)) as one:
        leaving = client(server, fate_key="fate/1")
        leaving.put("fate/1", b"finished", Deadline(5), once=True)
        leaving.close()
        time.sleep(0.2)
        assert one.wait(["fate/1"], Deadline(5)) == {"fate/1": b"finished"}


def test_a_closed_server_fails_its_clients_by_name(server: StoreServer) -> None:
    with closing(client(server)) as one:
        server.close()
        with pytest.raises(TransportError, match=f"127.0.0.1:{server.port} is lost"):
            one.put("a", b"1", Deadline(5))


def test_a_closed_server_frees_its_port_and_thread() -> None:
    first = StoreServer("127.0.0.1", TOKEN)
    first.close()
    with closing(StoreServer("127.0.0.1", TOKEN, first.port)) as second:
        assert second.port == first.port
        names = [thread.name for thread in threading.enumerate()]
        assert names.count(f"rendezvous-{first.port}") == 1


def test_a_stranger_that_sends_noise_is_cut_off_and_harms_nobody(server: StoreServer) -> None:
    with socket.create_connection((server.host, server.port), timeout=5) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while stranger.recv(4096):  # A refusal, then the end; a server that hangs times out.
            pass
    with closing(client(server)) as one:
        one.put("a", b"1", Deadline(5))


def test_a_value_too_large_for_a_frame_is_refused_by_the_client(server: StoreServer) -> None:
    with closing(client(server)) as one, pytest.raises(TransportError, match="exceeds"):
        one.put("a", bytes(MAX_FRAME), Deadline(5))


@given(st.text(), st.binary(), st.one_of(st.none(), st.text()), st.booleans())
def test_a_request_survives_its_frame(key: str, value: bytes, drop: str | None, once: bool) -> None:
    put = Put(key, value, drop, once)
    raw = frame(put)
    assert body_length(raw[:HEADER_BYTES]) == len(raw) - HEADER_BYTES
    assert decode_request(raw[HEADER_BYTES:]) == put


@given(st.binary(max_size=64))
def test_noise_is_a_named_error_or_a_request(noise: bytes) -> None:
    with suppress(TransportError):  # Any other exception fails the test.
        assert decode_request(frame(decode_request(noise))[HEADER_BYTES:])


@given(st.integers(MAX_FRAME + 1, (1 << 32) - 1))
def test_a_length_above_the_limit_is_refused_before_it_is_allocated(length: int) -> None:
    with pytest.raises(TransportError, match="exceeds"):
        body_length(length.to_bytes(HEADER_BYTES, "big"))


def test_a_hello_is_told_from_other_requests() -> None:
    assert decode_request(frame(Hello("t", None))[HEADER_BYTES:]) == Hello("t", None)
