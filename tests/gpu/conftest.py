"""One trainer process for all GPU tests, started while vLLM is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before vLLM is imported: the engine lives in the test's process, where its memory can be seen.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from tests.harness.gpu_trainers import GpuTrainers


@pytest.fixture(scope="session")
def trainer() -> Iterator[GpuTrainers]:
    """A trainer process on the engine's GPU."""
    with GpuTrainers(["cuda:0"]) as trainers:
        yield trainers
