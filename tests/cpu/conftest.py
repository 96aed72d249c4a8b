"""Fixtures that several refit tests share."""

from __future__ import annotations

import pytest

from tests.harness.oracle import Oracle


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Fresh engines, each started once per session."""
    return Oracle(tmp_path_factory.mktemp("checkpoints"))
