"""Fixtures that several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from generation_servers import KEY, WAIT_S, Backend, Handler
from router_makers import MakeBackend, MakeRouter

from generation.router import GenerationRouter


@pytest.fixture
def backend() -> Iterator[MakeBackend]:
    """Yields a maker of servers."""
    made: list[Backend] = []

    def make(handler: Handler) -> Backend:
        made.append(Backend(handler))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def router() -> Iterator[MakeRouter]:
    """Yields a maker of serving routers."""
    made: list[GenerationRouter] = []

    def make(*backends: Backend, **options: Any) -> GenerationRouter:
        built = GenerationRouter(**({"api_key": KEY} | options))
        made.append(built)
        built.set_backends([each.base_url for each in backends])
        built.start(WAIT_S)
        return built

    yield make
    for each in made:
        each.close(WAIT_S)
