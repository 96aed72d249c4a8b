"""The gate before an engine's server, with ASGI applications of a few lines behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from generation.http_server import App, Gate, Receive, Scope, Send

KEY = "fleet-key"
Message = dict[str, Any]


def server(
    *parts: bytes, kind: str = "text/event-stream", between: Callable[[], None] = lambda: None
) -> App:
    """Returns an application that answers in parts and does something before the last one."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", kind.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        between()
        await send({"type": "http.response.body", "body": b""})

    return app


async def nothing() -> Message:
    return {}


def ask(gate: Gate, kind: str = "http", key: str | None = KEY) -> list[Message]:
    """Sends one request; returns everything that was sent back."""
    sent: list[Message] = []

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    scope = {"type": kind, "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    asyncio.run(gate(scope, nothing, send))
    return sent


def body(sent: list[Message]) -> bytes:
    return b"".join(m["body"] for m in sent if m["type"] == "http.response.body")


def test_stream_over_a_refit_says_the_version_it_began_with_and_the_one_it_ended_with() -> None:
    version = 3

    def refit() -> None:
        nonlocal version
        version = 4

    app = server(b"data: 1\n\n", b"data: [DONE]\n\n", between=refit)
    sent = ask(Gate(app, api_key=KEY, version=lambda: version))
    assert (b"x-weight-version", b"3") in sent[0]["headers"]
    assert body(sent) == b"data: 1\n\ndata: [DONE]\n\n: x-weight-version-at-end 4\n\n"


def test_complete_answer_is_not_added_to() -> None:
    app = server(b"{}", kind="application/json")
    sent = ask(Gate(app, api_key=KEY, version=lambda: 3))
    assert body(sent) == b"{}"


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize("version", [3, None])
def test_websocket_is_refused_in_its_own_words(key: str | None, version: int | None) -> None:
    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("a websocket passed the gate")

    (message,) = ask(Gate(never, api_key=KEY, version=lambda: version), "websocket", key)
    assert (message["type"], message["code"]) == ("websocket.close", 1008)
    assert "HTTP" in message["reason"]
