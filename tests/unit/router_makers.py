"""What the router's fixtures offer: makers of servers and of routers."""

from __future__ import annotations

from collections.abc import Callable

from generation_servers import Backend, Handler

from generation.router import GenerationRouter

MakeBackend = Callable[[Handler], Backend]
MakeRouter = Callable[..., GenerationRouter]
