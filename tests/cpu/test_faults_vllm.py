"""Failures on real vLLM: every kind, over every transport, with two shards and two trainers.

The width of the matrix is on stand-ins (``python -m bench faults``); this shows that the same holds
for real engines: whatever serves afterwards is bit-equal to what a fresh engine loads from disk.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from bench.fault_injection import Fault, Injector
from bench.models import config
from tests.harness.engines import Engine, EngineRank
from tests.harness.oracle import Oracle
from tests.harness.trainers import Rank, Trainers, TrainerSpec
from weight_sync.errors import RefitError
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

MODEL = "tiny"
DEADLINE = 20.0
SILENCE = 4.0
# An attempt that somebody froze in, finding out who, and a retry that records anew.
LATE = 1.25 * DEADLINE

CELLS = [
    ("ipc", "worker", "raise", "install"),
    ("ipc", "worker", "slow", "transfer"),
    ("ipc", "worker", "close", "verify"),
    ("ipc", "trainer", "raise", "plan"),
    ("broadcast", "worker", "slow", "commit"),
    ("broadcast", "worker", "stop", "transfer"),
    ("broadcast", "trainer", "raise", "transfer"),
    ("broadcast", "trainer", "close", "transfer"),
    ("reshard", "worker", "raise", "connect"),
    ("reshard", "trainer", "slow", "transfer"),
    ("reshard", "trainer", "stop", "verify"),
    ("reshard", "worker", "kill", "commit"),
    ("reshard", "trainer", "kill", "transfer"),
]


class FaultyRank(EngineRank):
    """A real engine whose agent has a hook."""

    def arm(self, fault: Fault | None) -> None:
        """Sets the next fault, or none."""
        driver = self._llm.llm_engine.model_executor.driver_worker.worker
        injector = Injector()
        if fault is not None:
            injector.arm(fault)
        driver.__dict__["_weight_sync_agent"]._injected = injector


def arm_trainer(rank: Rank, fault: Fault | None) -> None:
    """Sets a trainer rank's next fault, or none."""
    rank.endpoint._fault.disarm()  # type: ignore[attr-defined]
    if fault is not None:
        rank.endpoint._fault.arm(fault)  # type: ignore[attr-defined]


class FaultyEngine(Engine):
    """One shard; its calls wait for each other, as an engine's do.

    Attributes:
        serving: Whether it would answer requests.
        version: What it would stamp them with.
    """

    def __init__(self, oracle: Oracle) -> None:
        super().__init__(oracle.random(MODEL, 0), 1, FaultyRank)
        self._one = threading.Lock()
        self.serving, self.version = True, 0

    def ask(self, method: str, *args: object, seconds: float = 120) -> list[object]:
        with self._one:
            return super().ask(method, *args, seconds=seconds)

    def pause(self) -> None:
        self.serving = False

    def resume(self) -> None:
        self.serving = True

    def set_version(self, version: int) -> None:
        self.version = version


class World:
    """Two trainer ranks and two engines, driven by this process."""

    def __init__(self, oracle: Oracle) -> None:
        self.oracle = oracle
        self.version = 0
        for weights in (0, 1):
            oracle.truth(oracle.random(MODEL, weights), 1)
        self.engines = [FaultyEngine(oracle) for _ in range(2)]
        self.trainers = self.start_trainers()
        for engine in self.engines:
            engine.ready()

    def start_trainers(self) -> Trainers:
        return Trainers(TrainerSpec(config(MODEL), "fsdp", 2, endpoint={"fault": Injector()}))

    def connect(self, transport: str) -> WeightSynchronizer:
        return WeightSynchronizer(
            self.trainers.infos,
            self.engines,
            transport=transport,
            deadline_s=DEADLINE,
            silence_s=SILENCE,
            bucket_bytes=32 << 10,
        )

    def publish(self) -> int:
        self.version += 1
        self.trainers.publish(self.version, self.version % 2)
        return self.version

    def arm(self, who: str, fault: Fault | None) -> int:
        """Sets a fault; returns the process it will happen in."""
        if who == "worker":
            self.engines[1].ask("arm", fault)
            return self.engines[1].ranks[0].pid
        self.trainers.ranks[1].ask("call", arm_trainer, fault)
        return self.trainers.ranks[1].pid

    def wrong(self, engine: FaultyEngine) -> list[list[str]]:
        """What differs from a fresh engine of the version that this one reports."""
        truth = self.oracle.truth(self.oracle.random(MODEL, engine.version % 2), 1)
        return truth.differences(engine)

    def close(self) -> None:
        self.trainers.close()
        for engine in self.engines:
            engine.close()


@pytest.fixture(scope="module")
def world(oracle: Oracle) -> Iterator[World]:
    made = World(oracle)
    yield made
    made.close()


def refit(world: World, synchronizer: WeightSynchronizer, *, absent: list[int]) -> None:
    """A good refit of everybody."""
    report = synchronizer.sync_weights(world.publish(), absent=absent)
    assert report.verified
    assert report.workers == 2


@pytest.mark.parametrize(("transport", "who", "kind", "stage"), CELLS)
def test_whatever_fails_what_serves_is_what_it_says(
    world: World, transport: str, who: str, kind: str, stage: str
) -> None:
    synchronizer = world.connect(transport)
    refit(world, synchronizer, absent=[])
    version = world.publish()
    victim = world.arm(who, Fault(kind, stage))
    if stage in ("plan", "connect"):
        synchronizer.replace_shard(0, world.engines[0])
    start = time.monotonic()
    outcome: RefitError | None = None
    try:
        report = synchronizer.sync_weights(version)
    except RefitError as error:
        outcome = error
    else:
        assert set(synchronizer.absent) == set(report.absent)
    assert time.monotonic() - start < LATE
    check_outcome(synchronizer, version, who, kind, outcome)

    if kind == "stop":
        os.kill(victim, signal.SIGCONT)
    living = [e for e in world.engines if e.ranks[0].process.is_alive()]
    for engine in living:
        assert not engine.serving or world.wrong(engine) == [[]]

    synchronizer = heal(world, synchronizer, transport)
    refit(world, synchronizer, absent=[])
    assert [e.serving for e in world.engines] == [True, True]
    assert [e.version for e in world.engines] == [world.version] * 2
    assert [world.wrong(e) for e in world.engines] == [[[]], [[]]]
    synchronizer.shutdown()


def check_outcome(
    synchronizer: WeightSynchronizer,
    version: int,
    who: str,
    kind: str,
    outcome: RefitError | None,
) -> None:
    """Slow ones are waited for, lost shards are left out, lost trainers are named."""
    if outcome is not None:
        assert outcome.stage
        assert outcome.ranks
        assert outcome.epoch is not None
        assert outcome.version == version
    if kind == "slow":
        assert outcome is None
    if kind == "raise":
        assert outcome is not None
        assert "injected" in str(outcome)
    if kind in ("kill", "stop") and who == "worker":
        assert outcome is None
        assert synchronizer.absent == (1,)
    if kind in ("kill", "stop") and who == "trainer":
        assert outcome is not None
        assert "trainer 1" in outcome.ranks
        assert ("died" if kind == "kill" else "frozen") in str(outcome)


def heal(world: World, synchronizer: WeightSynchronizer, transport: str) -> WeightSynchronizer:
    """Replaces who died; engines that run are not restarted."""
    for index, engine in enumerate(world.engines):
        if not engine.ranks[0].process.is_alive():
            engine.close()
            world.engines[index] = FaultyEngine(world.oracle)
            world.engines[index].ready()
            synchronizer.replace_shard(index, world.engines[index])
    if not all(rank.process.is_alive() for rank in world.trainers.ranks):
        world.trainers.close()
        synchronizer.shutdown()
        world.trainers = world.start_trainers()
        synchronizer = world.connect(transport)
    else:
        world.arm("trainer", None)
    return synchronizer
