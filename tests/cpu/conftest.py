"""Fixtures that several refit tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.contract import FACTORIES, NAMES, PACKING, prepare
from tests.harness.oracle import Oracle


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Fresh engines, each started once per session."""
    return Oracle(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(params=NAMES)
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every transport of the contract suite."""
    prepare(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=list(FACTORIES))
def hooked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every transport of the contract suite that calls the hooks of its workers per bucket."""
    prepare(request.param, monkeypatch)
    return request.param


@pytest.fixture(params=PACKING)
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every transport that packs buckets."""
    prepare(request.param, monkeypatch)
    return request.param


@pytest.fixture
def short_path() -> Iterator[Path]:
    """An empty folder whose path leaves room for socket names."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
