"""One stable OpenAI-compatible address in front of the shards' servers.

Shards come and go, each restart at a new address. Clients keep the router's; the controller pushes
the full set of serving addresses after every change.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterable

from aiohttp import web

from generation.auth import bearer_matches
from generation.errors import GenerationConfigError
from generation.prometheus import CONTENT_TYPE
from generation.router_pool import BackendPool, Outcomes
from generation.router_proxy import GENERATION_ROUTES, Proxy, ProxyLimits, error_response
from weight_sync.errors import EngineStateError

logger = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_POST_ROUTES = (*GENERATION_ROUTES, "/tokenize")
_GET_ROUTES = ("/v1/models",)
_MAX_BODY_BYTES = 256 * 1024 * 1024


class GenerationRouter:
    """Serves from its own thread; the address is bound, and known, once this is constructed.

    Args:
        api_key: Bearer key that every route demands, unknown routes included; None for no key.
        backend_api_key: Bearer key that the backends demand.
        health_managed: Whether the controller pushes backends by health; then a failing one leaves
            the rotation until the next push.
        host: Address to listen on.
        port: Port to listen on, 0 for any free one.
        request_timeout_s: Deadline of one request, from its first byte to its last, seconds.
        connect_timeout_s: Deadline of reaching a backend, seconds.
        metrics: Gives the text of ``GET /metrics``; None for no such route.

    Raises:
        GenerationConfigError: An empty key or a deadline that is not above 0.
        OSError: The address cannot be bound.
    """

    def __init__(
        self,
        *,
        api_key: str | None,
        backend_api_key: str | None = None,
        health_managed: bool = True,
        host: str = "127.0.0.1",
        port: int = 0,
        request_timeout_s: float = 900.0,
        connect_timeout_s: float = 10.0,
        metrics: Callable[[], str] | None = None,
    ) -> None:
        wrong = (
            [] if api_key != "" else ["api_key is empty; pass a key, or None for an open router"]
        )
        if not (request_timeout_s > 0 and connect_timeout_s > 0):
            wrong.append(f"deadlines must be above 0 s: {request_timeout_s}, {connect_timeout_s}")
        if wrong:
            raise GenerationConfigError("generation router", wrong)
        self._api_key = api_key
        self._metrics = metrics
        self._pool = BackendPool(health_managed=health_managed)
        limits = ProxyLimits(request_s=request_timeout_s, connect_s=connect_timeout_s)
        self._proxy = Proxy(self._pool, backend_api_key, limits)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=1024)
        shown = f"[{host}]" if ":" in host else host
        self.base_url: str = f"http://{shown}:{self._socket.getsockname()[1]}/v1"
        self._loop = asyncio.new_event_loop()
        self._runner: web.AppRunner | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, timeout_s: float = 10.0) -> None:
        """Begins to serve.

        Raises:
            EngineStateError: Started or closed before, or not serving within ``timeout_s``.
        """
        if self._closed or self._thread is not None:
            raise EngineStateError("the router was started or closed before; build a new one")
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="generation-router", daemon=True
        )
        self._thread.start()
        self._in_loop(self._serve(), timeout_s, "start serving")

    def set_backends(self, base_urls: Iterable[str]) -> None:
        """Makes exactly these addresses (``http://host:port/v1``) the rotation.

        Raises:
            GenerationConfigError: One is not an http(s) address; the rotation stays as it was.
        """
        self._pool.replace(base_urls)

    def backends(self) -> list[str]:
        """Returns the addresses in rotation."""
        return self._pool.rotation()

    def drain_outcomes(self) -> dict[str, Outcomes]:
        """Returns how requests came out since the last call, by backend address.

        For the health monitor. Only whole answers to generation requests are successes: a wedged
        engine still tells its models and tokenizes. Statuses below 500 and 501 are no failures.
        """
        return self._pool.drain_outcomes()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stops serving and frees the address; safe to call twice.

        Raises:
            EngineStateError: It did not stop within ``timeout_s``.
        """
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._in_loop(self._stop_serving(), timeout_s, "stop serving")
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise EngineStateError(f"the router's thread did not end within {timeout_s} s")
        self._socket.close()
        self._loop.close()

    def _in_loop(self, work: Awaitable[None], timeout_s: float, what: str) -> None:
        future = asyncio.run_coroutine_threadsafe(_with_deadline(work, timeout_s), self._loop)
        try:
            # One second more, so that the deadline inside the loop, which cleans up, is the one
            # that ends the wait.
            future.result(timeout_s + 1.0)
        except TimeoutError as error:
            raise EngineStateError(f"the router did not {what} within {timeout_s} s") from error

    async def _serve(self) -> None:
        app = web.Application(middlewares=[self._check_key], client_max_size=_MAX_BODY_BYTES)
        for path in _POST_ROUTES:
            app.router.add_post(path, self._proxy.handle)
        for path in _GET_ROUTES:
            app.router.add_get(path, self._proxy.handle)
        if self._metrics is not None:
            app.router.add_get("/metrics", self._serve_metrics)
        await self._proxy.open()
        # handler_cancellation: a client that hangs up ends its request on the backend as well.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.SockSite(self._runner, self._socket).start()

    async def _stop_serving(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self._proxy.close()

    @web.middleware
    async def _check_key(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        header = request.headers.get("Authorization")
        if self._api_key is not None and not bearer_matches(header, self._api_key):
            denied = error_response(401, "send the fleet's key as Authorization: Bearer")
            denied.headers["WWW-Authenticate"] = "Bearer"
            return denied
        return await handler(request)

    async def _serve_metrics(self, request: web.Request) -> web.StreamResponse:
        assert self._metrics is not None
        return web.Response(text=self._metrics(), headers={"Content-Type": CONTENT_TYPE})


async def _with_deadline(work: Awaitable[None], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        await work
