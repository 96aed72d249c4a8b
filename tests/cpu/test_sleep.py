"""Cases B28 and B29: engines asleep are neither refitted nor asked, and say why."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from bench.models import config
from tests.harness.engines import PROMPTS, Engine, EngineRank
from tests.harness.oracle import Oracle
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.errors import EngineStateError
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = pytest.mark.timeout(120)

# All tests share one engine, for which versions must grow.
VERSIONS = itertools.count(1)


@pytest.fixture(scope="module")
def engine(oracle: Oracle) -> Iterator[Engine]:
    with Engine(oracle.random("tiny", 0)) as engine:
        yield engine.ready()


@dataclass(frozen=True)
class Refits:
    """A trainer of the engine."""

    trainers: Trainers
    synchronizer: WeightSynchronizer

    def refit(self, weights: int) -> int:
        """Installs the weights of a version under a new number, which is returned."""
        version = next(VERSIONS)
        self.trainers.publish(version, weights)
        assert self.synchronizer.sync_weights(version).verified
        return version


@pytest.fixture
def refits(engine: Engine) -> Iterator[Refits]:
    with Trainers(TrainerSpec(config("tiny"))) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [engine], deadline_s=30)
        made = Refits(trainers, synchronizer)
        made.refit(1)
        yield made
        engine.ask("call", wake, None)
        synchronizer.shutdown()


def sleep(rank: EngineRank, level: int) -> None:
    rank._llm.sleep(level=level)


def wake(rank: EngineRank, tags: list[str] | None) -> None:
    if rank._llm.llm_engine.is_sleeping():
        rank._llm.wake_up(tags=tags)


def try_to_generate(rank: EngineRank) -> str:
    """What ``LocalLLM.generate`` says, or how many answers it gave."""
    from vllm import SamplingParams

    from weight_sync.engine import LocalLLM

    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    options = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    try:
        return str(len(LocalLLM(rank._llm).generate(prompts, options, use_tqdm=False)))
    except EngineStateError as error:
        return str(error)


@pytest.mark.parametrize("level", [1, 2])
def test_refit_of_sleeping_weights_is_refused_before_anything_changes(
    engine: Engine, refits: Refits, level: int
) -> None:
    before = engine.dump()
    held = refits.synchronizer.version
    engine.ask("call", sleep, level)
    with pytest.raises(EngineStateError, match="shard 0 worker 0 are asleep"):
        refits.refit(2)
    assert not refits.synchronizer.is_stale
    assert refits.synchronizer.version == held
    assert refits.synchronizer.shard_versions == (held,)
    assert engine.dump() == before


def test_weights_alone_may_wake_for_the_refit(
    engine: Engine, refits: Refits, oracle: Oracle
) -> None:
    truth = oracle.truth(oracle.random("tiny", 2), 1)
    for level in (2, 1):
        engine.ask("call", sleep, level)
        engine.ask("call", wake, ["weights"])
        refits.refit(2)
        engine.ask("call", wake, ["kv_cache"])
        assert truth.differences(engine) == [[]]
        assert engine.generate() == truth.generated


def test_a_plan_cannot_be_made_while_weights_are_asleep(engine: Engine) -> None:
    with Trainers(TrainerSpec(config("tiny"))) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [engine], deadline_s=30)
        engine.ask("call", sleep, 1)
        with pytest.raises(EngineStateError, match="asleep"):
            synchronizer.init_communicator()
        engine.ask("call", wake, None)
        synchronizer.init_communicator()


def test_generating_is_refused_while_memory_is_asleep_or_weights_are_discarded(
    engine: Engine, refits: Refits
) -> None:
    (said,) = engine.ask("call", try_to_generate)
    assert said == str(len(PROMPTS))
    engine.ask("call", sleep, 2)
    (said,) = engine.ask("call", try_to_generate)
    assert "kv_cache and weights asleep" in said
    engine.ask("call", wake, ["weights"])
    (said,) = engine.ask("call", try_to_generate)
    assert "kv_cache asleep" in said
    engine.ask("call", wake, ["kv_cache"])
    (said,) = engine.ask("call", try_to_generate)
    assert "discarded" in said
    refits.refit(2)
    (said,) = engine.ask("call", try_to_generate)
    assert said == str(len(PROMPTS))


def test_level_1_keeps_the_version(engine: Engine, refits: Refits) -> None:
    engine.ask("call", sleep, 1)
    engine.ask("call", wake, None)
    (said,) = engine.ask("call", try_to_generate)
    assert said == str(len(PROMPTS))
