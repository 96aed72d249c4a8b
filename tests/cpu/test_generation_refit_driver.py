"""The refit driver over stand-in engines: a replacement that fails holds up nobody else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from ray.actor import ActorHandle

from generation.answers import Answer
from generation.limits import Limits
from generation.refit_driver import RefitDriver
from generation.roster import Roster
from tests.harness.local import LocalShard, LocalTrainers
from tests.harness.sources import BoxSource, whole
from tests.harness.standin import StandinModel, Unit, copies
from weight_sync.errors import DeadlineError, EngineStateError, PeerDeadError, WeightSyncError
from weight_sync.report import RefitReport

WAIT_S = 20.0
SIZE = 8


class Engine(LocalShard):
    """A shard whose pause fails with ``error`` while there is one."""

    def __init__(self) -> None:
        unit = Unit("a", {"weight": ((SIZE,), torch.float32)})
        model = StandinModel([unit], {"a.weight": [("a", copies("weight"))]})
        super().__init__([model.load({"a.weight": torch.zeros(SIZE)})])
        self.error: WeightSyncError | None = None

    def pause(self) -> None:
        if self.error is not None:
            raise self.error
        super().pause()

    @property
    def value(self) -> float:
        return float(self.models[0].tensors()["a.weight"][0])


class Pool:
    """Front ends of engines that live and have finished their refits."""

    shards = (0, 1)
    shard_width = 1

    def leader(self, shard: int) -> ActorHandle:
        raise AssertionError("the engines are called directly")

    def ask(
        self, shards: Iterable[int], method: str, *args: object, timeout_s: float
    ) -> dict[int, Answer[Any]]:
        return {shard: Answer(value=method == "is_alive") for shard in shards}


class Driven:
    """Two shards, refitted once; then shard 1 was replaced."""

    def __init__(self, trainers: LocalTrainers) -> None:
        self._trainers = trainers
        self.roster = Roster(Pool.shards)
        self.driver = RefitDriver(Pool(), self.roster, Limits(refit_s=WAIT_S))
        self.engines = [Engine(), Engine()]
        self.driver._shards = self.engines
        self.driver.offer(trainers.infos, ())
        self.refit(1)
        self.replace()

    def replace(self) -> None:
        self.roster.died(1, "gone")
        self.roster.restarted(1)
        self.driver.replaced(1)

    def refit(self, version: int) -> RefitReport:
        self._trainers.publish(version)
        return self.driver.refit("memory", version, WAIT_S).result(WAIT_S)


@pytest.fixture
def driven() -> Iterator[Driven]:
    with LocalTrainers([BoxSource({"a.weight": whole(torch.full((SIZE,), 5.0))})]) as trainers:
        driven = Driven(trainers)
        yield driven
        driven.driver.close()


@pytest.mark.parametrize("kind", [PeerDeadError, DeadlineError])
def test_a_replacement_that_does_not_answer_is_dead_and_the_others_are_refitted(
    driven: Driven, kind: type[PeerDeadError] | type[DeadlineError]
):
    driven.engines[1].error = kind("died again", stage="pause")
    assert driven.refit(2).absent == (1,)
    assert driven.roster.alive() == driven.roster.serving() == [0]
    assert driven.refit(3).absent == (1,)


def test_a_replacement_of_a_failed_replacement_is_taken_in(driven: Driven):
    driven.engines[1].error = PeerDeadError("died again", stage="pause")
    driven.refit(2)
    driven.engines[1].error = None
    driven.replace()
    assert driven.refit(3).absent == ()
    assert driven.engines[1].value == 5.0
    assert driven.roster.serving() == [0, 1]


def test_a_replacement_that_refuses_is_asked_again_by_the_next_refit(driven: Driven):
    driven.engines[1].error = EngineStateError("not now")
    assert driven.refit(2).absent == (1,)
    assert (driven.roster.alive(), driven.roster.serving()) == ([0, 1], [0])
    driven.engines[1].error = None
    assert driven.refit(3).absent == ()
    assert driven.roster.serving() == [0, 1]


def test_a_failed_replacement_with_nobody_beside_it_is_the_refits_error(driven: Driven):
    driven.roster.died(0, "gone")
    driven.engines[1].error = PeerDeadError("died again", stage="pause")
    with pytest.raises(PeerDeadError, match="died again"):
        driven.refit(2)
    assert driven.roster.alive() == []


def test_groups_are_built_without_a_replacement_that_does_not_answer(driven: Driven):
    driven.engines[1].error = PeerDeadError("died again", stage="pause")
    membership = driven.driver.connect("memory").result(WAIT_S)
    assert membership.shards == (0,)
