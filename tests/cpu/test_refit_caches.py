"""Caches of earlier weights go with every version: beside the commit or after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from bench.models import config
from tests.harness.engines import start_llm
from tests.harness.local import LocalShard, LocalTrainers
from tests.harness.oracle import Oracle
from tests.harness.processes import Child
from tests.harness.sources import BoxSource, whole
from tests.harness.standin import StandinModel, Unit, copies
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.errors import CacheInvalidationError, DeadlineError, RefitError
from weight_sync.faults import FaultHook
from weight_sync.messages import TrainerEndpointInfo
from weight_sync.synchronizer import WeightSynchronizer
from weight_sync.worker.agent import WorkerAgent

pytestmark = pytest.mark.timeout(60)


class Shard(LocalShard):
    """A shard of one worker whose commit, and whose caches, can be held up.

    Attributes:
        caches_apart: Whether caches may be dropped while the worker commits.
        dropped: Set when caches were dropped.
        waits: Whether the commit waits for that when its bytes travel.
        fails: Whether the commit fails when its bytes travel.
        refuses: Whether caches cannot be dropped.
        stuck: What dropping caches waits for.
    """

    def __init__(self, apart: bool) -> None:
        self.caches_apart = apart
        self.dropped = threading.Event()
        self.stuck = threading.Event()
        self.stuck.set()
        self.refuses = self.waits = self.fails = False
        unit = Unit("t", {"weight": ((8,), torch.float32)})
        model = StandinModel([unit], {"t": [("t", copies("weight"))]})
        super().__init__([model.load({"t": torch.zeros(8)})])
        self.agents = [WorkerAgent(model, fault=self._fault)]

    def _fault(self, stage: str, offset: int = 0) -> None:
        if stage != "transfer" or offset:
            return
        if self.fails:
            raise ValueError("no more bytes")
        # A wait that times out is an error of the commit.
        if self.waits and not self.dropped.wait(5):
            raise TimeoutError("caches were not dropped while bytes travelled")
        self.log.append("transfer")

    def invalidate(self) -> None:
        self.stuck.wait(20)
        if self.refuses:
            raise CacheInvalidationError("requests are running")
        super().invalidate()
        self.dropped.set()


@pytest.fixture
def trainers() -> Iterator[LocalTrainers]:
    with LocalTrainers([BoxSource({"t": whole(torch.ones(8))})]) as made:
        yield made


def connect(trainers: LocalTrainers, shards: list[Shard]) -> WeightSynchronizer:
    return WeightSynchronizer(trainers.infos, shards, deadline_s=20)


def test_caches_that_are_apart_are_dropped_while_bytes_travel(trainers: LocalTrainers) -> None:
    shard = Shard(apart=True)
    shard.waits = True
    with connect(trainers, [shard]) as sync:
        trainers.publish(1)
        sync.sync_weights(1)
    assert shard.log == ["pause", "invalidate", "transfer", "version 1", "resume"]


def test_a_refit_that_failed_leaves_nobody_who_still_drops_caches(trainers: LocalTrainers) -> None:
    shard = Shard(apart=True)
    shard.fails = True
    shard.stuck.clear()
    with connect(trainers, [shard]) as sync:
        trainers.publish(1)
        sync.init_communicator()
        threading.Timer(0.5, shard.stuck.set).start()
        with pytest.raises(RefitError, match="no more bytes"):
            sync.sync_weights(1)
        assert shard.dropped.is_set()


def test_other_caches_are_dropped_after_the_commit(trainers: LocalTrainers) -> None:
    shard = Shard(apart=False)
    with connect(trainers, [shard]) as sync:
        trainers.publish(1)
        sync.sync_weights(1)
    assert shard.log == ["pause", "transfer", "invalidate", "version 1", "resume"]


@pytest.mark.parametrize("apart", [False, True])
def test_a_shard_that_refuses_is_not_resumed_and_the_others_are(
    trainers: LocalTrainers, apart: bool
) -> None:
    bad, good = Shard(apart), Shard(apart)
    bad.refuses = True
    with connect(trainers, [bad, good]) as sync:
        trainers.publish(1)
        with pytest.raises(CacheInvalidationError, match="requests are running"):
            sync.sync_weights(1)
        assert sync.shard_versions == (-1, 1)
    assert bad.log == ["pause", "transfer"]
    assert good.log[-2:] == ["version 1", "resume"]


@pytest.mark.parametrize("apart", [False, True])
def test_a_shard_that_never_answers_is_named_and_not_resumed(
    trainers: LocalTrainers, apart: bool
) -> None:
    shard = Shard(apart)
    shard.stuck.clear()
    with connect(trainers, [shard]) as sync:
        sync.init_communicator()
        trainers.publish(1)
        with pytest.raises(DeadlineError) as failed:
            sync.sync_weights(1, deadline_s=1.0)
        assert failed.value.ranks == ("shard 0",)
    assert "resume" not in shard.log
    shard.stuck.set()


def test_a_failed_commit_that_dropped_its_caches_drops_them_again_with_the_next(
    trainers: LocalTrainers,
) -> None:
    shard = Shard(apart=True)
    usual, shard.agents = shard.agents, [WorkerAgent(shard.models[0], fault=_fails_after(shard))]
    with connect(trainers, [shard]) as sync:
        trainers.publish(1)
        with pytest.raises(RefitError, match="no memory"):
            sync.sync_weights(1)
        assert shard.log == ["pause", "invalidate"]
        shard.agents = usual
        trainers.publish(2)
        sync.sync_weights(2)
    assert shard.log[2:].count("invalidate") == 1
    assert shard.log[-2:] == ["version 2", "resume"]


def _fails_after(shard: Shard) -> FaultHook:
    def fault(stage: str, offset: int = 0) -> None:
        if stage == "transfer":
            assert shard.dropped.wait(5)
            raise MemoryError("no memory")

    return fault


class InProcess:
    """A real engine whose scheduler is in this process, with prefix caching."""

    def __init__(self, folder: str) -> None:
        from weight_sync.engine import LocalLLM

        self._llm = start_llm(folder, enable_prefix_caching=True)
        self._shard = LocalLLM(self._llm)

    def apart(self) -> bool:
        return self._shard.caches_apart

    def refit(self, infos: list[TrainerEndpointInfo], version: int) -> bool:
        with WeightSynchronizer(infos, [self._shard], deadline_s=60) as sync:
            return sync.sync_weights(version).verified

    def cached(self) -> int:
        """Generates from one prompt; how many of its tokens were found in the prefix cache."""
        from vllm import SamplingParams

        (out,) = self._llm.generate(
            [{"prompt_token_ids": [1 + i % 90 for i in range(200)]}],
            SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, detokenize=False),
            use_tqdm=False,
        )
        return out.num_cached_tokens or 0


@pytest.mark.timeout(240)
def test_b54_a_real_engine_finds_nothing_of_earlier_weights_in_its_prefix_cache(
    oracle: Oracle,
) -> None:
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    folder = str(oracle.random("tiny", 0))
    child = Child(InProcess, folder, env=env, start_seconds=120, vllm=True)
    try:
        with Trainers(TrainerSpec(config("tiny"))) as weights:
            child.ready()
            assert child.ask("apart") is True
            assert (child.ask("cached"), child.ask("cached")) == (0, 128)
            for version in (1, 2):
                weights.publish(version)
                assert child.ask("refit", weights.infos, version)
                assert (child.ask("cached"), child.ask("cached")) == (0, 128)
    finally:
        child.close()
