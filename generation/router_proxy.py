"""One request through the router: choose a backend, forward, stream the answer, count outcomes."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import logging
from collections.abc import Awaitable

import aiohttp
from aiohttp import web

from generation.router_pool import BackendPool

logger = logging.getLogger(__name__)

STREAM_CHUNK_BYTES = 64 * 1024
GENERATION_ROUTES = ("/v1/chat/completions", "/v1/responses")
# What the request asks for, and never what the engine is in: vLLM says it for unsupported requests.
_NOT_SUPPORTED = 501

# What belongs to one connection, and the client's key, which is the router's and not the backends'.
_NOT_FORWARDED = frozenset(
    {
        "authorization",
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Failures before anything was sent: another backend may have the request.
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
# What the client did not say is not said for it; an encoding it did not offer it cannot read.
_NO_ADDED_HEADERS = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")


@dataclasses.dataclass(frozen=True)
class ProxyLimits:
    """Seconds that a whole request, and reaching a backend, may take."""

    request_s: float
    connect_s: float


def error_response(status: int, message: str) -> web.Response:
    """Returns an error in the shape OpenAI clients parse."""
    return web.json_response(
        {"error": {"message": message, "type": "router_error", "code": status}}, status=status
    )


class BackendError(Exception):
    """The backend gave no complete answer."""


class ClientGoneError(Exception):
    """The client closed its connection; no fault of the backend."""


class _ToClient:
    """The answer to one client, and whether a write to it is what is being waited for."""

    def __init__(self, request: web.Request) -> None:
        self.request = request
        self.answer = web.StreamResponse()
        self.writing = False

    async def send(self, write: Awaitable[object]) -> None:
        """Awaits one write, telling its failure apart from one of the backend."""
        self.writing = True
        try:
            await write
        except ConnectionError as error:
            raise ClientGoneError from error
        self.writing = False

    def end_with_error(self, message: str) -> web.StreamResponse:
        """Answers 500; when the answer has begun, ends the connection so it looks incomplete."""
        if not self.answer.prepared:
            return error_response(500, message)
        if self.request.transport is not None:
            self.request.transport.abort()
        return self.answer


class Proxy:
    """Forwards requests to the backends of a pool.

    Args:
        pool: The backends.
        backend_api_key: Bearer key that the backends demand, if any.
        limits: Deadlines.
    """

    def __init__(self, pool: BackendPool, backend_api_key: str | None, limits: ProxyLimits) -> None:
        self._pool = pool
        self._key = backend_api_key
        self._limits = limits
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Creates the client session; call inside the loop that serves."""
        # Connections are not reused: an idle one that the backend is closing would lose a POST,
        # which cannot be sent again. Unlimited, as a limit would queue requests silently.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            skip_auto_headers=_NO_ADDED_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._limits.connect_s),
        )

    async def close(self) -> None:
        """Closes the client session."""
        if self._session is not None:
            await self._session.close()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answers one client request within the deadline.

        Returns:
            The backend's answer; 409 when no backend is in rotation, 500 when the chosen one failed
            before its answer began. An answer that breaks off later ends the client's connection,
            so that half an answer never looks complete.
        """
        client = _ToClient(request)
        backend: str | None = None
        tried: set[str] = set()
        try:
            async with asyncio.timeout(self._limits.request_s):
                body = await request.read()
                while (backend := self._pool.acquire(excluding=tried)) is not None:
                    try:
                        return await self._forward(client, body, backend)
                    except _NOT_SENT as error:
                        self._failed(backend, error)
                        tried.add(backend)
                    finally:
                        self._pool.release(backend)
        except BackendError as error:
            self._failed(str(backend), error)
            return client.end_with_error(f"backend {backend} failed: {error}; send it again")
        except TimeoutError as error:
            late = backend if backend is not None and not client.writing else None
            if late is not None:
                self._failed(late, error)
            return client.end_with_error(
                f"{f'backend {late}' if late else 'the client'} was not done within "
                f"{self._limits.request_s} s"
            )
        except ClientGoneError:
            return client.answer
        if tried:
            return client.end_with_error(
                f"none of {len(tried)} backends accepted a connection; send it again later"
            )
        return error_response(
            409, "no generation backend is in rotation; wait for the next refit or restart"
        )

    async def _forward(self, client: _ToClient, body: bytes, backend: str) -> web.StreamResponse:
        assert self._session is not None
        request, answer = client.request, client.answer
        headers = [(k, v) for k, v in request.headers.items() if k.lower() not in _NOT_FORWARDED]
        if self._key is not None:
            headers.append(("Authorization", f"Bearer {self._key}"))
        try:
            async with self._session.request(
                request.method,
                backend.removesuffix("/v1") + request.path_qs,
                data=io.BytesIO(body) if body else None,  # sent in pieces, not in one long write
                headers=headers,
                allow_redirects=False,
            ) as reply:
                if reply.status >= 500 and reply.status != _NOT_SUPPORTED:
                    self._pool.record_failure(backend, unreachable=False)
                # Clients repeat a 504 by themselves, and a generation must not run twice.
                answer.set_status(500 if reply.status == 504 else reply.status)
                for name, value in reply.headers.items():
                    if name.lower() not in _NOT_FORWARDED:
                        answer.headers.add(name, value)
                await client.send(answer.prepare(request))
                async for chunk in reply.content.iter_chunked(STREAM_CHUNK_BYTES):
                    await client.send(answer.write(chunk))
                # The backend is done; a client that hangs up now takes nothing from it.
                if reply.status < 400 and request.path in GENERATION_ROUTES:
                    self._pool.record_success(backend)
                await client.send(answer.write_eof())
                return answer
        except _NOT_SENT:
            raise
        except aiohttp.ClientError as error:
            raise BackendError(f"{type(error).__name__}: {error}") from error

    def _failed(self, backend: str, error: BaseException) -> None:
        logger.warning("backend %s failed: %r", backend, error)
        self._pool.record_failure(backend, unreachable=True)
