"""The router in front of real HTTP servers on loopback."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import web
from generation_servers import (
    KEY,
    WAIT_S,
    Handler,
    ask,
    breaks_after,
    connect,
    hangs,
    hangs_after,
    says,
)
from router_makers import MakeBackend, MakeRouter, failures

from generation.errors import GenerationConfigError
from generation.router import GenerationRouter
from weight_sync.errors import EngineStateError


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/tokenize"),
        ("GET", "/v1/models"),
    ],
)
def test_route_is_forwarded_with_query_body_and_method(
    backend: MakeBackend, router: MakeRouter, method: str, path: str
) -> None:
    server = backend(says("hello"))
    base_url = router(server).base_url
    assert ask(base_url, f"{path}?a=b%20c", method=method, body=b"payload") == (
        200,
        {"text": "hello"},
    )
    sent = (b"payload",) if method == "POST" else (b"",)
    assert (server.seen[0][0], server.seen[0][1], server.seen[0][3]) == (
        method,
        f"{path}?a=b%20c",
        *sent,
    )


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", "/v1/responses", "/v1/models", "/tokenize", "/metrics", "/", "/other"],
)
def test_every_route_demands_the_key(backend: MakeBackend, router: MakeRouter, path: str) -> None:
    server = backend(says("hello"))
    base_url = router(server, metrics=lambda: "a 1\n").base_url
    denied = [ask(base_url, path, method=m, key=None) for m in ("GET", "POST", "OPTIONS", "PUT")]
    assert [status for status, _ in denied] == [401] * 4
    assert server.seen == []


@pytest.mark.parametrize("key", ["", "wrong", KEY[:-1], KEY + "x", "k\u00e9y"])
def test_wrong_key_is_refused(backend: MakeBackend, router: MakeRouter, key: str) -> None:
    server = backend(says("hello"))
    status, body = ask(router(server).base_url, key=key)
    assert status == 401
    assert "Authorization: Bearer" in body["error"]["message"]
    assert server.seen == []


def test_key_under_another_scheme_is_refused(backend: MakeBackend, router: MakeRouter) -> None:
    base_url = router(backend(says("hello"))).base_url
    status, _ = ask(base_url, key=None, headers={"Authorization": f"Basic {KEY}"})
    assert status == 401


def test_router_without_key_is_open(backend: MakeBackend, router: MakeRouter) -> None:
    assert ask(router(backend(says("hello")), api_key=None).base_url, key=None)[0] == 200


def test_backends_get_their_own_key_and_never_the_routers(
    backend: MakeBackend, router: MakeRouter
) -> None:
    server = backend(says("hello"))
    ask(router(server, backend_api_key="engine-key").base_url)
    ask(router(server).base_url)
    assert [seen[2].get("Authorization") for seen in server.seen] == ["Bearer engine-key", None]


def test_empty_rotation_is_409(router: MakeRouter) -> None:
    status, body = ask(router().base_url)
    assert status == 409
    assert body["error"]["code"] == 409


def test_address_of_a_restarted_shard_takes_over_from_a_push(
    backend: MakeBackend, router: MakeRouter
) -> None:
    old, new = backend(says("old")), backend(says("new"))
    built = router(old)
    address = built.base_url
    assert ask(address)[1] == {"text": "old"}
    old.close()
    built.set_backends([new.base_url])
    assert ask(address)[1] == {"text": "new"}
    assert built.backends() == [new.base_url]


@pytest.mark.parametrize("url", ["10.0.0.1:80", "ftp://host/v1", "", "http:///v1"])
def test_unusable_address_is_refused_and_the_rotation_stays(
    backend: MakeBackend, router: MakeRouter, url: str
) -> None:
    server = backend(says("hello"))
    built = router(server)
    with pytest.raises(GenerationConfigError, match="not an http"):
        built.set_backends([url])
    assert built.backends() == [server.base_url]


def test_requests_go_to_the_least_busy_backend(backend: MakeBackend, router: MakeRouter) -> None:
    go = threading.Event()

    async def waits(request: web.Request) -> web.StreamResponse:
        await asyncio.to_thread(go.wait, WAIT_S)
        return web.json_response({})

    slow, quick = backend(waits), backend(says("quick"))
    base_url = router(slow, quick).base_url
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, base_url)
        assert slow.entered.acquire(timeout=WAIT_S)
        assert [ask(base_url)[1] for _ in range(3)] == [{"text": "quick"}] * 3
        go.set()
        assert first.result(WAIT_S)[0] == 200


def test_answer_streams_while_the_backend_still_works(
    backend: MakeBackend, router: MakeRouter
) -> None:
    base_url = router(backend(hangs_after(b"data: 1\n\n"))).base_url
    connection, response = connect(base_url)
    assert response.read1(64) == b"data: 1\n\n"
    connection.close()


def test_headers_and_compressed_bodies_pass_untouched(
    backend: MakeBackend, router: MakeRouter
) -> None:
    packed = gzip.compress(b"hello")

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=packed, headers={"Content-Encoding": "gzip", "X-Mine": "yes"})

    connection, response = connect(
        router(backend(handler)).base_url, headers={"Accept-Encoding": "gzip"}
    )
    assert (response.headers["X-Mine"], response.read()) == ("yes", packed)
    connection.close()


def test_encoding_is_not_asked_for_in_the_clients_name(
    backend: MakeBackend, router: MakeRouter
) -> None:
    server = backend(says("hello"))
    with socket.create_connection(
        ("127.0.0.1", int(router(server).base_url.split(":")[2].split("/")[0])), WAIT_S
    ) as client:
        client.sendall(
            f"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
        )
        assert client.recv(1024).startswith(b"HTTP/1.1 200")
    assert "Accept-Encoding" not in server.seen[0][2]


def test_large_request_and_answer_pass_whole(backend: MakeBackend, router: MakeRouter) -> None:
    async def echo(request: web.Request) -> web.StreamResponse:
        return web.Response(body=await request.read())

    body = bytes(range(256)) * 20_000
    connection, response = connect(router(backend(echo)).base_url, body=body)
    assert response.read() == body
    connection.close()


def test_backend_that_never_answers_ends_in_500_at_the_deadline(
    backend: MakeBackend, router: MakeRouter
) -> None:
    server = backend(hangs)
    built = router(server, request_timeout_s=0.3)
    began = time.monotonic()
    status, body = ask(built.base_url)
    assert status == 500
    assert "not done within 0.3 s" in body["error"]["message"]
    assert time.monotonic() - began < WAIT_S / 2
    assert failures(built) == {server.base_url: 1}


def test_deadline_ends_the_request_on_the_backend_too(
    backend: MakeBackend, router: MakeRouter
) -> None:
    server = backend(hangs)
    ask(router(server, request_timeout_s=0.2).base_url)
    assert server.cut_off.wait(WAIT_S)


@pytest.mark.parametrize("handler", [hangs_after(b"part"), breaks_after(b"part")])
def test_half_an_answer_never_looks_complete(
    backend: MakeBackend, router: MakeRouter, handler: Handler
) -> None:
    server = backend(handler)
    built = router(server, request_timeout_s=0.4)
    connection, response = connect(built.base_url)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        response.read()
    connection.close()
    assert failures(built) == {server.base_url: 1}


def test_client_that_hangs_up_ends_its_request_and_is_no_failure(
    backend: MakeBackend, router: MakeRouter
) -> None:
    server = backend(hangs)
    built = router(server)
    connection = http.client.HTTPConnection(built.base_url.split("/")[2], timeout=WAIT_S)
    connection.request("POST", "/tokenize", b"{}", {"Authorization": f"Bearer {KEY}"})
    assert server.entered.acquire(timeout=WAIT_S)
    connection.close()
    assert server.cut_off.wait(WAIT_S)
    assert failures(built) == {}
    assert built.backends() == [server.base_url]


def test_client_too_slow_to_send_is_no_failure_of_a_backend(
    backend: MakeBackend, router: MakeRouter
) -> None:
    server = backend(says("hello"))
    built = router(server, request_timeout_s=0.3)
    port = int(built.base_url.split(":")[2].split("/")[0])
    head = f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    with socket.create_connection(("127.0.0.1", port), WAIT_S) as client:
        client.sendall(f"{head}Content-Length: 10\r\n\r\n12".encode())
        assert client.recv(4096).startswith(b"HTTP/1.1 500")
    assert failures(built) == {}
    assert server.seen == []


def test_client_too_slow_to_read_is_no_failure_of_a_backend(
    backend: MakeBackend, router: MakeRouter
) -> None:
    async def floods(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)

    server = backend(floods)
    built = router(server, request_timeout_s=0.5)
    connection, _ = connect(built.base_url)
    assert server.cut_off.wait(WAIT_S)
    assert failures(built) == {}
    assert built.backends() == [server.base_url]
    connection.close()


def test_pushes_during_many_requests_lose_none(backend: MakeBackend, router: MakeRouter) -> None:
    servers = [backend(says(str(i))) for i in range(3)]
    built = router(*servers)
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, built.base_url) for _ in range(64)]
        for step in range(20):
            built.set_backends([servers[step % 3].base_url, servers[(step + 1) % 3].base_url])
            time.sleep(0.005)
        assert {answer.result(WAIT_S)[0] for answer in answers} == {200}


def test_address_is_known_and_held_before_start() -> None:
    built = GenerationRouter(api_key=KEY)
    port = int(built.base_url.split(":")[2].split("/")[0])
    with pytest.raises(OSError, match="in use"):
        GenerationRouter(api_key=KEY, port=port)
    built.close()
    GenerationRouter(api_key=KEY, port=port).close()


def test_metrics_are_served_when_given(router: MakeRouter) -> None:
    built = router(metrics=lambda: "fleet_epoch 3\n")
    connection, response = connect(built.base_url, "/metrics", method="GET")
    assert (response.status, response.read()) == (200, b"fleet_epoch 3\n")
    assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    connection.close()


def test_unknown_route_is_404_with_the_key(router: MakeRouter) -> None:
    connection, response = connect(router().base_url, "/v1/other")
    assert response.status == 404
    connection.close()


@pytest.mark.parametrize(
    "options", [{"api_key": ""}, {"request_timeout_s": 0.0}, {"connect_timeout_s": -1.0}]
)
def test_unusable_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(GenerationConfigError, match="generation router"):
        GenerationRouter(**({"api_key": KEY} | options))


def test_close_twice_is_safe_and_ends_the_thread(backend: MakeBackend) -> None:
    before = threading.active_count()
    built = GenerationRouter(api_key=KEY)
    built.start(WAIT_S)
    built.close(WAIT_S)
    built.close(WAIT_S)
    assert threading.active_count() == before
    with pytest.raises(EngineStateError, match="build a new one"):
        built.start(WAIT_S)


def test_close_ends_with_a_request_still_running(backend: MakeBackend, router: MakeRouter) -> None:
    server = backend(hangs)
    built = router(server)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ask, built.base_url)
        assert server.entered.acquire(timeout=WAIT_S)
        began = time.monotonic()
        built.close(WAIT_S)
        assert time.monotonic() - began < WAIT_S


def test_error_body_is_json_for_openai_clients(router: MakeRouter) -> None:
    connection, response = connect(router().base_url)
    assert set(json.loads(response.read())["error"]) == {"message", "type", "code"}
    connection.close()
