"""The facade with two pipeline stages: every refit makes each what a fresh engine loads from disk.

vLLM's CPU workers cannot generate over stages; ``tests/multi_gpu/test_generation_pp.py`` does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from bench.models import Config, random_weights
from generation.answers import values_or_raise
from generation.settings import GENERATION_WORKER_OVERRIDES
from generation.vllm_generation import VllmGeneration
from tests.harness.dumps import Dump, differences
from tests.harness.fleets import NEW, WAIT_S, Fleet, checkpoint, model, settings
from tests.harness.observed_actor import OBSERVED
from tests.harness.oracle import Oracle
from tests.harness.trainers import Trainers, TrainerSpec

pytest_plugins = ["generation_fixtures"]
pytestmark = pytest.mark.timeout(240)

# Of trainers and of the checkpoint that the fleet starts from.
OLD = 0
# Three layers, so that stages differ. The embedding is tied, so both have it: the first one looks
# tokens up, the last one computes logits.
CFG: Config = {**model(), "num_hidden_layers": 3, "tie_word_embeddings": True}
EMBED = "model.embed_tokens.weight"
TRANSPORTS = ("ipc", "broadcast", "reshard")
# Buffers that no refit brings.
UNTRAINED = ("_scale", "cos_sin_cache")


@dataclass(frozen=True)
class Pipeline:
    """A fleet of one shard with two stages.

    Attributes:
        fleet: The fleet and its trainers.
        loaded: What each stage was when it had loaded ``OLD`` from disk.
        truth: What an engine with one worker is by the weights it loaded from disk.
    """

    fleet: Fleet
    loaded: list[Dump]
    truth: dict[int, Dump]

    def wrong(self, weights: int) -> list[list[str]]:
        """Names per stage whose bits are not those of a fresh engine."""
        return [self.differing(stage, weights) for stage in stages(self.fleet.gen)]

    def differing(self, stage: Dump, weights: int) -> list[str]:
        """Names of one stage whose bits are not those of a fresh engine."""
        truth = self.truth[weights]
        return differences(stage, {name: truth[name] for name in stage if name in truth})


def stages(gen: VllmGeneration) -> list[Dump]:
    return values_or_raise(gen.pool.ask([0], "observed_dump", timeout_s=WAIT_S))[0]


@pytest.fixture(scope="module")
def pipeline(
    local_ray: None, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pipeline]:
    from generation.cluster import RayCluster

    folders = {w: checkpoint(tmp_path_factory.mktemp(str(w)), w, CFG) for w in (OLD, NEW)}
    engine = {"async_engine": True, "pipeline_parallel_size": 2, "skip_tokenizer_init": True}
    # The override takes effect with a quant_cfg only.
    config = settings(folders[OLD], engine, quant_cfg="observed")
    with contextlib.ExitStack() as stack:
        cluster = RayCluster([2], gpus_per_bundle=0)
        stack.callback(cluster.shutdown)
        with pytest.MonkeyPatch.context() as patch:
            for default, observed in OBSERVED.items():
                patch.setitem(GENERATION_WORKER_OVERRIDES, default, observed)
            gen = VllmGeneration(cluster, config, name_prefix="stages")
        stack.callback(gen.shutdown)
        loaded = stages(gen)
        truth = {w: oracle.truth(folder, 1).dumps[0] for w, folder in folders.items()}
        trainers = stack.enter_context(Trainers(TrainerSpec(CFG, "fsdp", 2)))
        gen.prepare_refit_info(trainers.infos)
        yield Pipeline(Fleet(gen, trainers), loaded, truth)


def test_the_stages_share_the_layers_and_both_have_the_tied_embedding(pipeline: Pipeline):
    """Under the same names, so that stages can be compared with an engine of one worker."""
    first, last = pipeline.loaded
    assert first.keys() | last.keys() == pipeline.truth[OLD].keys()
    assert "model.layers.0.mlp.down_proj.weight" in first.keys() - last.keys()
    assert "model.layers.2.mlp.down_proj.weight" in last.keys() - first.keys()
    assert first.keys() & last.keys() == {EMBED, f"forward of {EMBED.removesuffix('.weight')}"}


def test_the_stages_loaded_what_one_worker_loads(pipeline: Pipeline):
    assert [pipeline.differing(stage, OLD) for stage in pipeline.loaded] == [[], []]


def test_versions_differ_in_all_that_is_trained(pipeline: Pipeline):
    """So that bits of one version cannot pass for those of the other."""
    for stage in pipeline.loaded:
        changed = set(pipeline.differing(stage, NEW))
        # Some CPUs pack a linear's weight, and only what it computes is left to compare.
        packed = {f"{name.removeprefix('forward of ')}.weight" for name in changed}
        assert all(name.endswith(UNTRAINED) for name in stage.keys() - changed - packed)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_every_stage_equals_a_fresh_engine_at_v1_at_v0_and_again_at_v1(
    pipeline: Pipeline, transport: str
):
    for weights, other in ((NEW, OLD), (OLD, NEW), (NEW, OLD)):
        pipeline.fleet.refit(weights, transport)
        assert pipeline.wrong(weights) == [[], []]
        assert all(pipeline.wrong(other))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_both_stages_answer_for_a_refit(pipeline: Pipeline, transport: str):
    assert pipeline.fleet.reported(NEW, transport).workers == 2


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stage_gets_its_own_layers_and_both_get_the_embedding(pipeline: Pipeline, transport: str):
    full = random_weights(CFG, 1000)
    everything = sum(tensor.nbytes for tensor in full.values())
    assert pipeline.fleet.reported(NEW, transport).bytes == everything + full[EMBED].nbytes
