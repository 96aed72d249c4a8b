"""Real vLLM that serves quantized checkpoints: after refits it is as if loaded from disk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from bench.models import config, random_weights
from bench.quantized_models import FORMATS, is_quantized, write_quantized
from tests.harness.cpu_quantized import OnlineRank, QuantizedRank
from tests.harness.engines import Engine
from tests.harness.oracle import Oracle
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = pytest.mark.timeout(240)

MODEL = "tiny-fp8"
# An engine never goes back to an earlier version, whoever sends it.
VERSIONS = count(1)
# The plain block kernel keeps the loaders' layout, the MXFP8 one repacks: see cpu_quantized.py.
MODES = {"mxfp8": "processed", "fp8": "direct"}
LAYOUTS = {"plain": ("plain", 1), "fsdp-2": ("fsdp", 2), "tp-2": ("tp", 2)}


@dataclass(frozen=True)
class Running:
    """An engine that started from version 0, quantized."""

    form: str
    tp: int
    engine: Engine


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Path]:
    """Quantized checkpoints of versions 0 and 1."""
    folder = tmp_path_factory.mktemp("quantized")
    cfg = config(MODEL)
    return {
        (form, version): write_quantized(
            cfg, random_weights(cfg, 1000 + version), FORMATS[form], folder / f"{form}-{version}"
        )
        for form in MODES
        for version in (0, 1)
    }


@pytest.fixture(scope="module", params=[("mxfp8", 1), ("mxfp8", 2), ("fp8", 2)], ids=str)
def running(
    request: pytest.FixtureRequest, checkpoints: dict[tuple[str, int], Path], oracle: Oracle
) -> Iterator[Running]:
    form, tp = request.param
    for version in (0, 1):
        oracle.truth(checkpoints[form, version], tp, QuantizedRank)
    with Engine(checkpoints[form, 0], tp, QuantizedRank) as engine:
        yield Running(form, tp, engine.ready())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_engine_equals_one_that_loaded_the_quantized_checkpoint(
    running: Running,
    checkpoints: dict[tuple[str, int], Path],
    oracle: Oracle,
    layout: tuple[str, int],
) -> None:
    with Trainers(TrainerSpec(config(MODEL), *layout)) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [running.engine], deadline_s=30)
        for weights in (1, 0):
            version = next(VERSIONS)
            trainers.publish(version, weights)
            report = synchronizer.sync_weights(version)
            truth = oracle.truth(checkpoints[running.form, weights], running.tp, QuantizedRank)
            assert report.verified
            assert truth.differences(running.engine) == [[]] * running.tp
            assert running.engine.generate() == truth.generated
        assert report.modes[MODES[running.form]] >= 8
        assert report.modes.get("loader", 0) == 0
        synchronizer.shutdown()


def test_three_refits_of_the_same_weights_change_nothing_after_the_first(
    running: Running,
) -> None:
    with Trainers(TrainerSpec(config(MODEL))) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [running.engine], deadline_s=30)
        seen = []
        for _ in range(3):
            version = next(VERSIONS)
            trainers.publish(version, 5)
            synchronizer.sync_weights(version)
            seen.append((running.engine.dump(), running.engine.generate()))
        synchronizer.shutdown()
    assert seen[0] == seen[1] == seen[2]


def test_engine_wants_exactly_the_matrices_its_checkpoint_holds_quantized(
    running: Running,
) -> None:
    with Trainers(TrainerSpec(config(MODEL))) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [running.engine], deadline_s=30)
        synchronizer.init_communicator()
        names = [spec.name for spec in synchronizer.wanted]
        assert {spec.format for spec in synchronizer.wanted} == {FORMATS[running.form]}
        synchronizer.shutdown()
    assert names == sorted(n for n in random_weights(config(MODEL), 0) if is_quantized(n))


def test_engine_that_quantizes_online_takes_bf16_and_equals_a_fresh_one(oracle: Oracle) -> None:
    with (
        Engine(oracle.random(MODEL, 0), 1, OnlineRank) as engine,
        Trainers(TrainerSpec(config(MODEL), "fsdp", 2)) as trainers,
    ):
        synchronizer = WeightSynchronizer(trainers.infos, [engine.ready()], deadline_s=30)
        for version, weights in ((1, 1), (2, 0), (3, 0)):
            trainers.publish(version, weights)
            report = synchronizer.sync_weights(version)
            truth = oracle.truth(oracle.random(MODEL, weights), 1, OnlineRank)
            assert report.verified
            assert truth.differences(engine) == [[]]
            assert engine.generate() == truth.generated
        assert synchronizer.wanted == ()
        assert report.modes["processed"] >= 8
        synchronizer.shutdown()
