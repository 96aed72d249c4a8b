"""Fixtures of the facade's tests, a plug-in: all test files share one async fleet."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from generation.vllm_generation import VllmGeneration
from tests.harness.fleets import NEW, Fleet, FreshEngine, checkpoint, model, settings
from tests.harness.trainers import Trainers, TrainerSpec


@pytest.fixture(scope="session")
def local_ray() -> Iterator[None]:
    """Ray on this machine only."""
    import ray

    # Ray kills actors when the machine is short of memory, whoever uses it.
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")
    # Ray would let its actors run only when nobody else wants the cores.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Whole GiB, and it would win over what fleets ask for.
    space = os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    ray.init(
        num_cpus=16,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=128 * 1024 * 1024,
    )
    if space is not None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = space
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that fleets start from."""
    return checkpoint(tmp_path_factory.mktemp("tiny"))


@dataclasses.dataclass(frozen=True)
class Started:
    """A fleet that was started deferred, and its HTTP addresses before and after it loaded."""

    gen: VllmGeneration
    reserved: list[str | None]
    served: list[str | None]


@pytest.fixture(scope="session")
def started(
    local_ray: None, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Started]:
    """Two async shards with an HTTP server each."""
    from generation.cluster import RayCluster

    traces = tmp_path_factory.mktemp("traces")
    engine = {
        "async_engine": True,
        "expose_http_server": True,
        "http_server_api_key_required": True,
        "enable_vllm_metrics_logger": True,
        "vllm_metrics_logger_interval": 0.05,
    }
    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": str(traces),
        "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }
    cluster = RayCluster([1, 1], gpus_per_bundle=0)
    gen = VllmGeneration(
        cluster,
        settings(folder, engine, max_new_tokens=220, vllm_kwargs={"profiler_config": profiler}),
        defer_model_load=True,
    )
    reserved = gen.dp_openai_server_base_urls
    gen.load_and_start()
    yield Started(gen, reserved, gen.dp_openai_server_base_urls)
    gen.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="session")
def fleet(started: Started) -> Iterator[Fleet]:
    """The two shards and their trainer; every test leaves them alive and in service."""
    with Trainers(TrainerSpec(model())) as trainers:
        started.gen.prepare_refit_info(trainers.infos)
        yield Fleet(started.gen, trainers)
        started.gen.shutdown()


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreshEngine]:
    """A fresh engine of the ``NEW`` weights."""
    engine = FreshEngine(checkpoint(tmp_path_factory.mktemp("new"), NEW))
    yield engine
    engine.close()
