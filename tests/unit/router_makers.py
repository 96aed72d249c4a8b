"""What tests of the router share: makers of servers and of routers, and looks at what it counts."""

from __future__ import annotations

import socket
from collections.abc import Callable

from generation_servers import Backend, Handler

from generation.router import GenerationRouter

MakeBackend = Callable[[Handler], Backend]
MakeRouter = Callable[..., GenerationRouter]


def failures(router: GenerationRouter) -> dict[str, int]:
    """Returns the failures since the last look, of the backends that had some."""
    return {url: o.failures for url, o in router.drain_outcomes().items() if o.failures}


def unused_address() -> str:
    """Returns an address that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/v1"
