"""Refits over NVLink: a trainer on another GPU, FSDP2 beside TP workers, pairing by UUID."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA GPUs", allow_module_level=True)

# The engine core lives in the test's process, so that memory and plans can be looked at; workers of
# a tensor parallel engine must not be forked from a process that uses CUDA.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from bench.models import config
from tests.harness.gpu_engines import (
    Bits,
    addresses,
    bits,
    changed,
    checkpoint,
    collect,
    greedy,
    model_of,
    start,
)
from tests.harness.gpu_trainers import GpuTrainers, OpenWeights
from weight_sync.engine import LocalLLM
from weight_sync.identity import visible_devices
from weight_sync.report import RefitReport
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(300)]

CONFIG = config("tiny")
# Tests share engines, for which versions must grow.
VERSIONS = itertools.count(1)


def refit(sync: WeightSynchronizer, weights: OpenWeights, values: int) -> RefitReport:
    """Installs the weights of a version under a new number."""
    version = next(VERSIONS)
    weights.publish(version, values)
    report = sync.sync_weights(version)
    assert report.verified
    return report


@pytest.mark.parametrize("kind", ["plain", "fp32", "host"])
def test_trainer_on_one_gpu_reaches_an_engine_on_the_other(
    alone: tuple[object, Bits, list[list[int]], dict[str, int]], far: GpuTrainers, kind: str
) -> None:
    llm, disk, tokens, before = alone
    with far.weights(CONFIG, kind) as weights:
        sync = WeightSynchronizer(weights.infos, [LocalLLM(llm)], deadline_s=60)
        for values in (1, 2, 0):
            refit(sync, weights, values)
        sync.shutdown()
    if kind != "fp32":
        # fp32 masters are other values than the checkpoint's.
        assert changed(disk, bits(model_of(llm))) == []
        assert greedy(llm) == tokens
    assert changed(before, addresses(model_of(llm))) == []


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[object, Bits, list[list[int]], dict[str, int]]]:
    """An engine with one worker, on GPU 0."""
    llm = start(checkpoint(CONFIG, 0, tmp_path_factory.mktemp("alone")))
    tokens = greedy(llm)
    yield llm, bits(model_of(llm)), tokens, addresses(model_of(llm))
    del llm
    collect()


@pytest.fixture(scope="module")
def far() -> Iterator[GpuTrainers]:
    """A trainer process on GPU 1."""
    with GpuTrainers(["cuda:1"]) as trainers:
        yield trainers


@dataclass(frozen=True)
class Pair:
    """A tensor parallel engine on both GPUs and what its workers were right after loading."""

    llm: object
    disk: list[Bits]
    tokens: list[list[int]]
    devices: list[str]

    def differences(self) -> list[list[str]]:
        """Names per worker whose bits differ from the engine that loaded version 0 from disk."""
        now = self.llm.collective_rpc("observed_bits")
        return [changed(a, b) for a, b in zip(self.disk, now, strict=True)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = checkpoint(CONFIG, 0, tmp_path_factory.mktemp("pair"))
    llm = start(
        folder,
        tensor_parallel_size=2,
        distributed_executor_backend="mp",
        disable_custom_all_reduce=True,
    )
    disk = llm.collective_rpc("observed_bits")
    return Pair(llm, disk, greedy(llm), llm.collective_rpc("observed_device"))


def senders(sync: WeightSynchronizer, worker: int) -> set[int]:
    """Trainer ranks that a worker reads from."""
    assert sync.plan is not None
    return set(np.unique(sync.plan.receiver_program(worker).sender.unpack()).tolist())


def test_fsdp2_on_the_gpus_of_a_tensor_parallel_engine(pair: Pair) -> None:
    """Every worker reads its half from both trainer ranks; nothing is gathered."""
    with GpuTrainers(["cuda:0", "cuda:1"]) as trainers, trainers.weights(CONFIG, "fsdp") as weights:
        sync = WeightSynchronizer(weights.infos, [LocalLLM(pair.llm)], deadline_s=60)
        seen = []
        for values in (1, 2, 0):
            assert refit(sync, weights, values).workers == 2
            seen.append(pair.differences())
        assert [senders(sync, worker) for worker in (0, 1)] == [{0, 1}, {0, 1}]
        sync.shutdown()
    assert all(seen[0])
    assert seen[2] == [[], []]
    assert greedy(pair.llm) == pair.tokens


def test_replicas_are_paired_by_uuid_when_their_process_sees_the_gpus_in_another_order(
    pair: Pair,
) -> None:
    """B34: rank 0's local cuda:0 is the engine's second GPU."""
    here = visible_devices()
    env = {"CUDA_VISIBLE_DEVICES": ",".join(reversed(here))}
    with (
        GpuTrainers(["cuda:0", "cuda:1"], env) as trainers,
        trainers.weights(CONFIG, "plain") as weights,
    ):
        assert [info.device for info in weights.infos] == list(reversed(here))
        sync = WeightSynchronizer(weights.infos, [LocalLLM(pair.llm)], deadline_s=60)
        for values in (1, 0):
            refit(sync, weights, values)
        for worker, device in enumerate(pair.devices):
            own = [info.rank for info in weights.infos if info.device == device]
            assert senders(sync, worker) == set(own)
        sync.shutdown()
    assert pair.differences() == [[], []]
    assert greedy(pair.llm) == pair.tokens
