"""Cases B28 and B29: engines asleep are neither refitted nor asked, and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.models import config
from tests.harness.engines import PROMPTS, Engine, EngineRank
from tests.harness.oracle import Oracle
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.errors import EngineStateError
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def engine(oracle: Oracle) -> Iterator[Engine]:
    with Engine(oracle.random("tiny", 0)) as engine:
        yield engine.ready()


@pytest.fixture
def refits(engine: Engine) -> Iterator[tuple[Trainers, WeightSynchronizer]]:
    with Trainers(TrainerSpec(config("tiny"))) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [engine], deadline_s=30)
        trainers.publish(1)
        synchronizer.sync_weights(1)
        yield trainers, synchronizer
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
    engine: Engine, refits: tuple[Trainers, WeightSynchronizer], level: int
) -> None:
    trainers, synchronizer = refits
    before = engine.dump()
    engine.ask("call", sleep, level)
    trainers.publish(2)
    with pytest.raises(EngineStateError, match="shard 0 worker 0 are asleep"):
        synchronizer.sync_weights(2)
    assert not synchronizer.is_stale
    assert synchronizer.version == 1
    assert synchronizer.shard_versions == (1,)
    assert engine.dump() == before


def test_weights_alone_may_wake_for_the_refit(
    engine: Engine, refits: tuple[Trainers, WeightSynchronizer], oracle: Oracle
) -> None:
    trainers, synchronizer = refits
    truth = oracle.truth(oracle.random("tiny", 2), 1)
    for version, level in ((2, 2), (3, 1)):
        engine.ask("call", sleep, level)
        engine.ask("call", wake, ["weights"])
        trainers.publish(version, 2)
        assert synchronizer.sync_weights(version).verified
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
    engine: Engine, refits: tuple[Trainers, WeightSynchronizer]
) -> None:
    trainers, synchronizer = refits
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
    trainers.publish(2)
    synchronizer.sync_weights(2)
    (said,) = engine.ask("call", try_to_generate)
    assert said == str(len(PROMPTS))


def test_level_1_keeps_the_version(
    engine: Engine, refits: tuple[Trainers, WeightSynchronizer]
) -> None:
    engine.ask("call", sleep, 1)
    engine.ask("call", wake, None)
    (said,) = engine.ask("call", try_to_generate)
    assert said == str(len(PROMPTS))
