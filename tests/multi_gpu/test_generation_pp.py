"""The facade with two pipeline stages on two GPUs, refitted from FSDP2 on the same GPUs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA GPUs", allow_module_level=True)

from bench.models import Config
from generation.answers import values_or_raise
from generation.cluster import RayCluster
from generation.limits import Limits
from generation.settings import GENERATION_WORKER_OVERRIDES
from generation.vllm_generation import VllmGeneration
from tests.harness.fleets import NEW, WAIT_S, Fleet, ask, checkpoint, model, prompts, settings
from tests.harness.gpu_fleets import START_S, FreshGpuEngine, generated, ray_with_gpus, under_way
from tests.harness.gpu_trainers import GpuTrainers
from tests.harness.observed_actor import OBSERVED
from weight_sync.identity import visible_devices

if TYPE_CHECKING:
    from tests.harness.gpu_engines import Bits

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(300)]

# Of trainers and of the checkpoint that the fleet starts from.
OLD = 0
STREAMS = 16
# Three layers, so that stages differ. Tied, the embedding is in both: the last one computes logits
# with it.
MODELS: dict[str, Config] = {
    "untied": {**model(), "num_hidden_layers": 3},
    "tied": {**model(), "num_hidden_layers": 3, "tie_word_embeddings": True},
}


@dataclass(frozen=True)
class Pipeline:
    """A fleet of one shard with two stages.

    Attributes:
        fleet: The fleet and its trainers.
        loaded: What each stage was when it had loaded ``OLD`` from disk.
        fresh: Engines with one worker by the weights they loaded from disk.
    """

    fleet: Fleet
    loaded: list[Bits]
    fresh: dict[int, FreshGpuEngine]

    def bits(self) -> list[Bits]:
        """Digests of all parameters and buffers of each stage."""
        return stages(self.fleet.gen)

    def wrong(self, weights: int) -> list[list[str]]:
        """Names per stage whose bits are not those of a fresh engine."""
        return differing(self.bits(), self.fresh[weights].bits())


def differing(found: list[Bits], truth: Bits) -> list[list[str]]:
    """Names per stage whose bits are not those of ``truth``."""
    return [sorted(n for n in stage if stage[n] != truth.get(n)) for stage in found]


def stages(gen: VllmGeneration) -> list[Bits]:
    return values_or_raise(gen.pool.ask([0], "observed_bits", timeout_s=WAIT_S))[0]


@pytest.fixture(scope="module")
def two_gpus() -> Iterator[None]:
    with ray_with_gpus(2):
        yield


@pytest.fixture(scope="module", params=list(MODELS))
def pipeline(
    request: pytest.FixtureRequest, two_gpus: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pipeline]:
    cfg = MODELS[request.param]
    folders = {w: checkpoint(tmp_path_factory.mktemp(str(w)), w, cfg) for w in (OLD, NEW)}
    engine = {"async_engine": True, "pipeline_parallel_size": 2, "skip_tokenizer_init": True}
    # The override takes effect with a quant_cfg only.
    config = settings(folders[OLD], engine, max_new_tokens=230, quant_cfg="observed")
    cluster = RayCluster([2])
    # They start while the fleet does.
    fresh = {w: FreshGpuEngine(folder) for w, folder in folders.items()}
    try:
        with pytest.MonkeyPatch.context() as patch, GpuTrainers(["cuda:0", "cuda:1"]) as trainers:
            for default, observed in OBSERVED.items():
                patch.setitem(GENERATION_WORKER_OVERRIDES, default, observed)
            gen = VllmGeneration(cluster, config, limits=Limits(load_s=START_S, call_s=WAIT_S))
            loaded = stages(gen)
            with trainers.weights(cfg, "fsdp") as weights:
                gen.prepare_refit_info(weights.infos)
                # The trainers offer what those on the CPU offer.
                yield Pipeline(Fleet(gen, weights), loaded, fresh)  # type: ignore[arg-type]
                assert gen.shutdown() is True
    finally:
        for one in fresh.values():
            one.close()
        cluster.shutdown()


def test_every_stage_has_a_gpu_of_its_own(pipeline: Pipeline):
    assert pipeline.fleet.gen.device_uuids is not None
    (found,) = pipeline.fleet.gen.device_uuids
    assert sorted(found) == sorted(visible_devices())


def test_the_stages_together_loaded_what_one_gpu_loads(pipeline: Pipeline):
    """Under the same names, so that stages can be compared with an engine of one worker."""
    truth = pipeline.fresh[OLD].bits()
    first, last = pipeline.loaded
    assert first.keys() | last.keys() == truth.keys()
    assert "model.layers.0.mlp.down_proj.weight" in first.keys() - last.keys()
    assert "model.layers.2.mlp.down_proj.weight" in last.keys() - first.keys()
    assert differing(pipeline.loaded, truth) == [[], []]


def test_both_stages_equal_a_fresh_engine_at_v1_and_again_at_v0(pipeline: Pipeline):
    pipeline.fleet.refit(OLD)
    assert all(pipeline.wrong(NEW))
    for weights in (NEW, OLD):
        pipeline.fleet.refit(weights)
        assert pipeline.wrong(weights) == [[], []]
    assert pipeline.bits() == pipeline.loaded


def test_tokens_are_those_of_a_fresh_engine_and_carry_the_version(pipeline: Pipeline):
    for weights, other in ((NEW, OLD), (OLD, NEW)):
        version = pipeline.fleet.refit(weights)
        answers = [ask(pipeline.fleet.gen, prompt) for prompt in prompts(2)]
        assert [(s.start, s.stop, s.weight_version) for a in answers for s in a.spans] == [
            (0, 230, version)
        ] * 2
        assert not pipeline.fresh[weights].off(answers)
        assert len(pipeline.fresh[other].off(answers)) > 230


def test_a_refit_in_flight_switches_version_and_tokens_at_the_same_place(pipeline: Pipeline):
    fleet = pipeline.fleet
    before = fleet.refit(OLD)
    version = fleet.publish(NEW)
    running = under_way(fleet.gen, STREAMS)
    (future,) = fleet.gen.update_weights_via_ipc_zmq(version=version)
    assert future.result(WAIT_S).verified
    answers = running.answers()
    crossed = [a for a in answers if [s.weight_version for s in a.spans] == [before, version]]
    assert crossed, [a.spans for a in answers]
    assert not pipeline.fresh[NEW].off(crossed, [a.spans[1].start for a in crossed])
    assert pipeline.wrong(NEW) == [[], []]


def test_a_paused_pipeline_keeps_its_streams_and_generates_nothing(pipeline: Pipeline):
    fleet = pipeline.fleet
    version = fleet.refit(NEW)
    running = under_way(fleet.gen, STREAMS)
    assert fleet.gen.pause_generation_for_refit(clear_cache=True) is True
    assert pipeline.wrong(NEW) == [[], []]  # both stages answer while they stand still
    still = generated(fleet.gen)
    time.sleep(0.3)
    assert generated(fleet.gen) == still
    assert fleet.gen.resume_generation_after_refit() is True
    answers = running.answers()
    assert [[s.weight_version for s in a.spans] for a in answers] == [[version]] * STREAMS
    assert not pipeline.fresh[NEW].off(answers)
