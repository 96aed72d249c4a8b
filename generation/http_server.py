"""vLLM's own OpenAI-compatible server inside the engine's actor, behind the fleet's key.

Every route demands the key, also those that vLLM's own ``--api-key`` leaves open. Chat answers
carry token ids, log-probabilities, expert routes and weight versions, as a trainer needs them.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

from generation.auth import bearer_matches
from generation.chat import attach_token_information_to_chat_response_choices
from generation.config import VllmConfig
from generation.outputs import version_spans
from generation.routed_experts import attach_routed_experts_to_chat_response_choices
from weight_sync.errors import EngineStateError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

VERSION_HEADER = b"x-weight-version"
_START_TIMEOUT_S = 60.0
_POLICY_VIOLATION = 1008  # the close code of RFC 6455, section 7.4.1


class Gate:
    """Lets a request in only with the key, and to generate only with vouched-for weights.

    Answers carry the weight version at the request's arrival as a header. A refit may come later:
    event streams end with a comment that gives the version at their end. Websockets are refused:
    nothing here could hold back or stamp what an open one generates.

    Args:
        app: The server behind it.
        api_key: The fleet's key; None for an open server.
        version: Gives the weight version; None while the engine waits for its first refit.
    """

    def __init__(self, app: App, *, api_key: str | None, version: Callable[[], int | None]) -> None:
        self._app = app
        self._api_key = api_key
        self._version = version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one ASGI event."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            reason = "websockets are not served; use the HTTP routes"
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION, "reason": reason})
            return
        headers = dict(scope.get("headers", ()))
        given = headers.get(b"authorization", b"").decode("latin-1")
        if self._api_key is not None and not bearer_matches(given, self._api_key):
            await _refuse(send, 401, "send the fleet's key as Authorization: Bearer")
            return
        version = self._version()
        if version is None and scope.get("method") == "POST":
            await _refuse(send, 503, "this engine waits for its first refit; send it again later")
            return

        streams = False

        async def stamped(message: MutableMapping[str, Any]) -> None:
            nonlocal streams
            last = message["type"] == "http.response.body" and not message.get("more_body", False)
            if message["type"] == "http.response.start" and version is not None:
                own = list(message.get("headers", ()))
                kinds = [value for name, value in own if name.lower() == b"content-type"]
                streams = any(kind.startswith(b"text/event-stream") for kind in kinds)
                stamp = (VERSION_HEADER, str(version).encode())
                message = {**message, "headers": [*own, stamp]}
            elif last and streams:
                end = b": %s-at-end %d\n\n" % (VERSION_HEADER, self._version() or 0)
                message = {**message, "body": message.get("body", b"") + end}
            await send(message)

        await self._app(scope, receive, stamped)


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": {"message": message, "type": "gate", "code": status}}).encode()
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class HttpServer:
    """The server of one engine, on the actor's event loop.

    Args:
        engine: vLLM's ``AsyncLLM``.
        config: The fleet's config; its key is the one that is demanded.
        version: Gives the weight version; None while the engine waits for its first refit.
    """

    def __init__(
        self,
        engine: Any,  # noqa: ANN401 - vLLM's class
        config: VllmConfig,
        version: Callable[[], int | None],
    ) -> None:
        self._engine = engine
        self._config = config
        self._version = version
        self._server: Any = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, bound: socket.socket | None) -> None:
        """Serves on a socket that is bound already.

        Raises:
            EngineStateError: No socket, or not serving in time.
        """
        if bound is None:
            raise EngineStateError("reserve a port before the HTTP server starts")
        import uvicorn

        app = Gate(
            await self._build_app(),
            api_key=self._config.vllm_cfg.http_server_api_key,
            version=self._version,
        )
        settings = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
        self._server = uvicorn.Server(settings)
        self._task = asyncio.create_task(self._server.serve(sockets=[bound]))
        async with asyncio.timeout(_START_TIMEOUT_S):
            while not self._server.started:
                if self._task.done():
                    raise EngineStateError(f"the HTTP server ended: {self._task.exception()!r}")
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        """Ends the server; requests in flight are cut off."""
        if self._task is not None:
            self._server.should_exit = True
            self._server.force_exit = True
            await asyncio.wait([self._task], timeout=_START_TIMEOUT_S)

    async def _build_app(self) -> App:
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        make_arg_parser, build_app, init_app_state = _server_parts()
        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(
            ["--model", self._config.model_name]
        )
        tasks = await self._engine.get_supported_tasks()
        app = build_app(arguments, tasks, self._engine.model_config)
        await init_app_state(self._engine, app.state, arguments, tasks)
        attach_to_chat(app.state.openai_serving_chat, self._config, self._version)
        return app


def _server_parts() -> tuple[Any, Any, Any]:
    """vLLM's argument parser, app and state makers, wherever this vLLM keeps them."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:
        from vllm.entrypoints.openai.api_server import build_app, init_app_state
        from vllm.entrypoints.openai.cli_args import make_arg_parser
    return make_arg_parser, build_app, init_app_state


def attach_to_chat(
    chat: Any,  # noqa: ANN401 - vLLM's class
    config: VllmConfig,
    version: Callable[[], int | None],
) -> None:
    """Makes a vLLM chat handler put tokens, routes and versions on its complete answers."""
    plain = chat.chat_completion_full_generator

    async def with_tokens(
        request: object, results: AsyncIterator[Any], *args: object, **kwargs: object
    ) -> Any:  # noqa: ANN401 - vLLM's class
        final: list[Any] = []

        async def watched() -> AsyncIterator[Any]:
            async for output in results:
                final[:] = [output]
                yield output

        response = await plain(request, watched(), *args, **kwargs)
        if not hasattr(response, "choices"):
            return response
        attach_token_information_to_chat_response_choices(response, final[0])
        if config.routed:
            attach_routed_experts_to_chat_response_choices(response, final[0], device="cpu")
        by_index = {output.index: output for output in final[0].outputs}
        for choice in response.choices:
            output = by_index[choice.index]
            spans = version_spans(output, len(output.token_ids), version() or 0)
            choice.message.weight_versions = [
                {"start": s.start, "stop": s.stop, "version": s.weight_version} for s in spans
            ]
        return response

    chat.chat_completion_full_generator = with_tokens
