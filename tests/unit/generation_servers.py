"""Real aiohttp servers on loopback that stand behind the router in its tests."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from aiohttp import web

WAIT_S = 5.0
KEY = "fleet-key"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Backend:
    """Serves every path with one handler, in its own thread.

    Attributes:
        base_url: Its address, ending in ``/v1``.
        seen: Method, path with query, headers and body of every request.
        entered: Released once for every request.
        cut_off: Set when a request was ended by the other side.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.entered = threading.Semaphore(0)
        self.cut_off = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(self._start())

    def _run(self, work: Awaitable[None]) -> None:
        async def wrapped() -> None:
            await work

        asyncio.run_coroutine_threadsafe(wrapped(), self._loop).result(WAIT_S)

    async def _start(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0]
        self.base_url = f"http://{host}:{port}/v1"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.seen.append((request.method, request.path_qs, dict(request.headers), body))
        self.entered.release()
        try:
            return await self._handler(request)
        except (asyncio.CancelledError, ConnectionError):
            self.cut_off.set()
            raise

    def close(self) -> None:
        """Ends the server and its thread; its port refuses connections from then on."""
        if self._loop.is_closed():
            return
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()


def says(text: str, status: int = 200) -> Handler:
    """Returns a handler that answers ``text``."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response({"text": text}, status=status)

    return handler


async def hangs(request: web.Request) -> web.StreamResponse:
    """Never answers."""
    await asyncio.sleep(60.0)
    return web.Response()


def hangs_after(part: bytes) -> Handler:
    """Returns a handler that begins its answer and never ends it."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(part)
        await asyncio.sleep(60.0)
        return response

    return handler


def breaks_after(part: bytes) -> Handler:
    """Returns a handler that begins its answer and then loses its connection."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(part)
        assert request.transport is not None
        request.transport.abort()
        return response

    return handler


def connect(
    base_url: str,
    path: str = "/v1/chat/completions",
    *,
    method: str = "POST",
    key: str | None = KEY,
    body: bytes = b"{}",
    headers: dict[str, str] | None = None,
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """Sends one request and returns its connection and the begun answer."""
    connection = http.client.HTTPConnection(urlsplit(base_url).netloc, timeout=WAIT_S)
    sent = dict(headers or {})
    if key is not None:
        sent["Authorization"] = f"Bearer {key}"
    connection.request(method, path, body=body if method == "POST" else None, headers=sent)
    return connection, connection.getresponse()


def ask(base_url: str, path: str = "/v1/chat/completions", **options: object) -> tuple[int, dict]:  # type: ignore[type-arg]
    """Sends one request; returns its status and JSON body."""
    connection, response = connect(base_url, path, **options)  # type: ignore[arg-type]
    try:
        return response.status, json.loads(response.read())
    finally:
        connection.close()
