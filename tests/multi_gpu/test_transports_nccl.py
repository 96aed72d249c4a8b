"""Broadcast and reshard over NCCL: a trainer on the second GPU, real vLLM on the first."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch

# Before vLLM is imported: the engine lives in the test's process, where its memory can be seen.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Both sides must agree; vLLM sets the first one itself, the machine may not support multicast.
os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA GPUs", allow_module_level=True)

from bench.models import config
from tests.harness.gpu_engines import (
    Bits,
    bits,
    changed,
    checkpoint,
    collect,
    greedy,
    model_of,
    start,
)
from tests.harness.gpu_trainers import GpuTrainers, masters
from weight_sync.engine import LocalLLM
from weight_sync.errors import AbortedError
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(300)]

# Every stream has several buckets, and the largest tensors are larger than one.
BUCKET = 32 << 10
TRANSPORTS = ("broadcast", "reshard")


@dataclass(frozen=True)
class Running:
    """An engine, and what it is when it loads version 1 from disk.

    Versions only ever grow in an engine, so every test takes new ones from ``versions``.
    """

    model: str
    llm: object
    shard: LocalLLM
    bits: Bits
    tokens: list[list[int]]
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))


@pytest.fixture(scope="module")
def trainer() -> Iterator[GpuTrainers]:
    with GpuTrainers(["cuda:1"]) as trainers:
        yield trainers


# vLLM makes its expert groups when the first engine of a process starts, so the MoE comes first.
@pytest.fixture(scope="module", params=["tiny-moe", "tiny"])
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    cfg = config(request.param)
    fresh = start(checkpoint(cfg, 1, tmp_path_factory.mktemp("v1")))
    want = bits(model_of(fresh)), greedy(fresh)
    del fresh
    collect()
    llm = start(checkpoint(cfg, 0, tmp_path_factory.mktemp("v0")))
    yield Running(request.param, llm, LocalLLM(llm), *want)
    del llm
    collect()


@pytest.mark.parametrize("kind", ["plain", "host", "mixed"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engine_equals_a_fresh_one_bit_for_bit(
    running: Running, trainer: GpuTrainers, transport: str, kind: str
) -> None:
    with trainer.weights(config(running.model), kind) as weights:
        sync = WeightSynchronizer(
            weights.infos,
            [running.shard],
            transport=transport,
            deadline_s=30,
            bucket_bytes=BUCKET,
        )
        for version, which in zip(running.versions, (0, 1), strict=False):
            weights.publish(version, which)
            assert sync.sync_weights(version).verified
        sync.shutdown()
    assert changed(running.bits, bits(model_of(running.llm))) == []
    assert greedy(running.llm) == running.tokens


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_weights_that_do_not_fit_beside_the_engine_arrive_in_rounds(
    running: Running, trainer: GpuTrainers, transport: str
) -> None:
    with trainer.weights(config(running.model), "plain") as weights:
        sync = WeightSynchronizer(
            weights.infos,
            [running.shard],
            transport=transport,
            deadline_s=30,
            bucket_bytes=BUCKET,
            stage_bytes=256 << 10,
        )
        for version, which in zip(running.versions, (0, 1), strict=False):
            weights.publish(version, which)
            assert sync.sync_weights(version).verified
        assert sync._conductor is not None
        assert sync._conductor.later_rounds
        sync.shutdown()
    assert changed(running.bits, bits(model_of(running.llm))) == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_fp32_masters_are_rounded_on_the_way(
    running: Running, trainer: GpuTrainers, transport: str
) -> None:
    cfg = config(running.model)
    with trainer.weights(cfg, "fp32") as weights:
        sync = WeightSynchronizer(
            weights.infos, [running.shard], transport=transport, deadline_s=30
        )
        version = next(running.versions)
        weights.publish(version, 1)
        assert sync.sync_weights(version).verified
        sync.shutdown()
    want = masters(cfg, 1)["model.norm.weight"].to(torch.bfloat16)
    have = dict(model_of(running.llm).named_parameters())["model.norm.weight"]
    assert torch.equal(have.detach().cpu(), want)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_b43_weights_written_on_a_side_stream_just_before_publish_arrive(
    running: Running, trainer: GpuTrainers, transport: str
) -> None:
    name = "model.norm.weight"
    with trainer.weights(config(running.model), "plain") as weights:
        sync = WeightSynchronizer(
            weights.infos, [running.shard], transport=transport, deadline_s=30
        )
        for _ in range(5):
            version = next(running.versions)
            weights.ask("publish_late", version, float(version))
            sync.sync_weights(version)
            weights.ask("overwrite", -1.0)
            got = dict(model_of(running.llm).named_parameters())[name]
            assert got.detach().float().unique().tolist() == [float(version)]
        sync.shutdown()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_after_an_abort_the_next_good_refit_takes_at_most_three_seconds(
    running: Running, trainer: GpuTrainers, transport: str
) -> None:
    with trainer.weights(config(running.model), "plain") as weights:
        sync = WeightSynchronizer(
            weights.infos, [running.shard], transport=transport, deadline_s=30
        )
        first, second, third = (next(running.versions) for _ in range(3))
        weights.publish(first)
        epoch = sync.sync_weights(first).epoch
        assert sync._conductor is not None
        start_of_abort = time.perf_counter()
        sync._conductor.abort("the test wants it")
        weights.publish(second)
        with pytest.raises(AbortedError, match="the test wants it"):
            sync.sync_weights(second)
        weights.publish(third)
        report = sync.sync_weights(third)
        took = time.perf_counter() - start_of_abort
        sync.shutdown()
    assert report.verified
    assert report.epoch > epoch
    assert took <= 3.0
