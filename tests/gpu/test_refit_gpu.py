"""Refits into real vLLM on a GPU, from every kind of memory a trainer may hold its weights in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from bench.models import config, shapes
from tests.harness.gpu_engines import (
    Bits,
    addresses,
    agent_of,
    bits,
    changed,
    checkpoint,
    collect,
    greedy,
    model_of,
    start,
)
from tests.harness.gpu_trainers import GpuTrainers, OpenWeights
from weight_sync.cuda_ipc import OpenHandles
from weight_sync.engine import LocalLLM
from weight_sync.errors import EnvironmentUnsupportedError
from weight_sync.report import RefitReport
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CONFIG = config("tiny")
# The largest tensors are larger, and every stream has several buckets.
BUCKET = 32 << 10
# Of memory, as one bucket: torch hands it out in blocks of this size.
TOLERANCE = 2 << 20


@dataclass
class Running:
    """An engine and what it was right after it loaded version 0 from disk."""

    llm: object
    disk: Bits
    tokens: list[list[int]]
    # All tests share the engine, for which versions must grow.
    versions: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def refit(
        self, sync: WeightSynchronizer, *holders: OpenWeights, weights: int, verify: bool = True
    ) -> RefitReport:
        """Installs the weights of a version under a new number."""
        version = next(self.versions)
        for holder in holders:
            holder.publish(version, weights)
        report = sync.sync_weights(version, verify=verify)
        assert report.verified == verify
        return report


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    llm = start(checkpoint(CONFIG, 0, tmp_path_factory.mktemp("v0")))
    engine = Running(llm, bits(model_of(llm)), greedy(llm))
    del llm
    yield engine
    # The next engine needs the memory, and pytest still refers to the value.
    engine.llm = None
    collect()


def synchronizer(running: Running, infos: list, **options: object) -> WeightSynchronizer:
    return WeightSynchronizer(infos, [LocalLLM(running.llm)], deadline_s=60, **options)


def test_engine_equals_a_fresh_one_after_other_versions_bit_for_bit(
    running: Running, trainer: GpuTrainers
) -> None:
    before = addresses(model_of(running.llm))
    with trainer.weights(CONFIG, "plain") as weights:
        sync = synchronizer(running, weights.infos)
        seen = []
        for values in (1, 2, 0):
            report = running.refit(sync, weights, weights=values)
            assert set(report.modes) <= {"direct", "processed"}
            assert not sync.is_stale
            seen.append((bits(model_of(running.llm)), greedy(running.llm)))
        sync.shutdown()
    assert changed(running.disk, seen[2][0]) == []
    assert seen[2][1] == running.tokens
    trained = {n for n in running.disk if n.endswith((".weight", ".bias"))}
    assert trained <= set(changed(seen[0][0], seen[1][0]))
    assert seen[0][1] != seen[1][1]
    assert changed(before, addresses(model_of(running.llm))) == []


@pytest.mark.parametrize("kind", ["host", "mixed", "expandable", "cumem"])
def test_weights_that_cannot_be_mapped_arrive_exactly_through_the_ring(
    running: Running, trainer: GpuTrainers, kind: str
) -> None:
    """B31: offloaded weights, and memory that has no handle."""
    with trainer.weights(CONFIG, kind) as weights:
        sync = synchronizer(running, weights.infos, bucket_bytes=BUCKET)
        for values in (1, 2, 0):
            running.refit(sync, weights, weights=values)
        assert changed(running.disk, bits(model_of(running.llm))) == []
        assert greedy(running.llm) == running.tokens
        (slots,) = weights.ask("slots")
        sync.shutdown()
    largest = max(prod(shape) for _, shape in shapes(CONFIG)) * 2
    assert [len(pair) for pair in slots] == [2]
    assert sum(slots[0]) <= 2 * BUCKET + 2 * largest


def test_fp32_masters_are_rounded_in_flight_as_torch_does(
    running: Running, trainer: GpuTrainers
) -> None:
    with trainer.weights(CONFIG, "rounded") as weights:
        sync = synchronizer(running, weights.infos)
        running.refit(sync, weights, weights=1)
        want = bits(model_of(running.llm))
    with trainer.weights(CONFIG, "fp32") as weights:
        sync = synchronizer(running, weights.infos)
        for values in (2, 1):
            running.refit(sync, weights, weights=values)
        (slots,) = weights.ask("slots")
        sync.shutdown()
    assert changed(want, bits(model_of(running.llm))) == []
    assert slots == []


def test_memory_that_may_not_be_opened_is_refused_and_the_next_refit_works(
    running: Running, trainer: GpuTrainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B31: a container without the rights."""

    def denied(self: OpenHandles, handle: bytes, offset: int) -> int:
        raise RuntimeError("permission denied")

    before = bits(model_of(running.llm))
    with trainer.weights(CONFIG, "plain") as weights:
        sync = synchronizer(running, weights.infos)
        with monkeypatch.context() as patch:
            patch.setattr(OpenHandles, "address", denied)
            with pytest.raises(EnvironmentUnsupportedError, match="--ipc=host"):
                running.refit(sync, weights, weights=1)
        assert bits(model_of(running.llm)) == before
        running.refit(sync, weights, weights=2)
        sync.shutdown()


def test_weights_that_moved_are_mapped_again_and_old_mappings_closed(
    running: Running, trainer: GpuTrainers
) -> None:
    with trainer.weights(CONFIG, "plain") as weights:
        sync = synchronizer(running, weights.infos)
        running.refit(sync, weights, weights=1)
        mapper = agent_of(running.llm)._session.transport._mapper
        first = mapper._handles
        weights.ask("move")
        running.refit(sync, weights, weights=0)
        assert first.opened == first.closed > 0
        assert mapper._handles is not first
        assert changed(running.disk, bits(model_of(running.llm))) == []
        sync.shutdown()


def test_weights_written_on_a_side_stream_just_before_publish_arrive(
    running: Running, trainer: GpuTrainers
) -> None:
    """B43: the copy waits for the producer's stream, and later writes never appear."""
    norm = dict(model_of(running.llm).named_parameters())["model.norm.weight"]
    with trainer.weights(CONFIG, "plain") as weights:
        sync = synchronizer(running, weights.infos)
        for value in range(1, 101):
            version = next(running.versions)
            weights.ask("publish_late", version, float(value))
            sync.sync_weights(version, verify=value % 2 == 0)
            weights.ask("overwrite", -1.0)
            assert norm.detach().float().unique().tolist() == [float(value)]
        sync.shutdown()


def test_fifty_refits_leave_memory_and_handles_as_they_were(
    running: Running, trainer: GpuTrainers
) -> None:
    """B32: nothing grows between refit 2 and refit 50, and every handle is closed."""
    with (
        trainer.weights(CONFIG, "plain") as weights,
        trainer.weights(CONFIG, "plain", first=1) as replica,
    ):
        sync = synchronizer(running, [*weights.infos, *replica.infos], bucket_bytes=TOLERANCE)
        seen = {}
        for count in range(1, 51):
            running.refit(sync, weights, replica, weights=count % 2)
            torch.cuda.synchronize()
            if count in (2, 50):
                ours = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
                (theirs,) = trainer.ask("memory")
                seen[count] = [*ours, *theirs]
        handles = agent_of(running.llm)._session.transport._mapper._handles
        opened = handles.opened
        sync.shutdown()
    *early, descriptors = seen[2]
    *late, still = seen[50]
    assert still == descriptors
    grown = [b - a for a, b in zip(early, late, strict=True)]
    assert max(grown) <= TOLERANCE, f"bytes grown (ours, theirs): {grown}"
    assert handles.opened == handles.closed == opened > 0
