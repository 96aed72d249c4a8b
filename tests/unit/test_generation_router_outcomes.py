"""What the router makes of answers: which count for a backend, which against it."""

from __future__ import annotations

import http.client

import pytest
from aiohttp import web
from generation_servers import (
    ask,
    breaks_after,
    connect,
    says,
)
from router_makers import MakeBackend, MakeRouter, failures, unused_address

from generation.router_pool import Outcomes


def test_client_error_of_the_backend_passes_and_is_no_failure(
    backend: MakeBackend, router: MakeRouter
) -> None:
    built = router(backend(says("bad prompt", status=400)))
    assert ask(built.base_url) == (400, {"text": "bad prompt"})
    assert failures(built) == {}


@pytest.mark.parametrize(("given", "seen"), [(500, 500), (503, 503), (504, 500)])
def test_server_error_of_the_backend_passes_never_as_504(
    backend: MakeBackend, router: MakeRouter, given: int, seen: int
) -> None:
    server = backend(says("broken", status=given))
    built = router(server)
    assert ask(built.base_url) == (seen, {"text": "broken"})
    assert failures(built) == {server.base_url: 1}
    assert built.backends() == [server.base_url]


def test_backend_that_refuses_connections_gives_500(router: MakeRouter) -> None:
    address = unused_address()
    built = router()
    built.set_backends([address])
    status, body = ask(built.base_url)
    assert status == 500
    assert "none of 1 backends accepted" in body["error"]["message"]
    assert failures(built) == {address: 1}


def test_request_that_was_not_sent_goes_to_another_backend(
    backend: MakeBackend, router: MakeRouter
) -> None:
    address, server = unused_address(), backend(says("hello"))
    built = router()
    built.set_backends([address, server.base_url])
    assert ask(built.base_url) == (200, {"text": "hello"})
    assert failures(built) == {address: 1}


def test_request_that_was_sent_is_not_sent_again(backend: MakeBackend, router: MakeRouter) -> None:
    async def drops(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    broken, other = backend(drops), backend(says("hello"))
    built = router(broken, other)
    status, body = ask(built.base_url)
    assert status == 500
    assert broken.base_url in body["error"]["message"]
    assert other.seen == []


def test_failing_backend_leaves_a_health_managed_rotation_until_the_next_push(
    backend: MakeBackend, router: MakeRouter
) -> None:
    server = backend(says("hello"))
    built = router(server, health_managed=True)
    server.close()
    assert ask(built.base_url)[0] == 500
    assert ask(built.base_url)[0] == 409
    built.set_backends([server.base_url])
    assert ask(built.base_url)[0] == 500


def test_failing_backend_stays_in_an_unmanaged_rotation(
    backend: MakeBackend, router: MakeRouter
) -> None:
    server = backend(says("hello"))
    built = router(server, health_managed=False)
    server.close()
    assert [ask(built.base_url)[0] for _ in range(2)] == [500, 500]
    assert failures(built) == {server.base_url: 2}


def test_failures_are_counted_since_the_last_drain(
    backend: MakeBackend, router: MakeRouter
) -> None:
    server = backend(says("broken", status=500))
    built = router(server)
    ask(built.base_url)
    ask(built.base_url)
    assert failures(built) == {server.base_url: 2}
    assert failures(built) == {}


def test_request_that_vllm_does_not_support_is_no_failure_of_the_backend(
    backend: MakeBackend, router: MakeRouter
) -> None:
    built = router(backend(says("no such thing", status=501)))
    assert ask(built.base_url)[0] == 501
    assert failures(built) == {}


def test_success_ends_the_failures_before_it(backend: MakeBackend, router: MakeRouter) -> None:
    statuses = iter([500, 500, 200, 500])

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=next(statuses))

    server = backend(handler)
    built = router(server)
    for _ in range(4):
        ask(built.base_url)
    assert built.drain_outcomes() == {server.base_url: Outcomes(succeeded=True, failures=1)}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models", 200),
        ("POST", "/tokenize", 200),
        ("POST", "/v1/chat/completions", 400),
    ],
)
def test_answer_for_which_nothing_was_generated_is_no_success(
    backend: MakeBackend, router: MakeRouter, method: str, path: str, status: int
) -> None:
    built = router(backend(says("hello", status=status)))
    assert ask(built.base_url, path, method=method)[0] == status
    assert built.drain_outcomes() == {}


def test_half_a_generation_is_no_success(backend: MakeBackend, router: MakeRouter) -> None:
    server = backend(breaks_after(b"part"))
    built = router(server)
    connection, response = connect(built.base_url)
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        response.read()
    connection.close()
    assert built.drain_outcomes() == {server.base_url: Outcomes(succeeded=False, failures=1)}
