"""Case B06: tied embeddings reach the head however engine and trainer hold the pair."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from bench.models import Config, config, random_weights
from tests.harness.engines import Engine, EngineRank
from tests.harness.oracle import Oracle
from tests.harness.trainers import Trainers, TrainerSpec
from weight_sync.errors import CoverageError
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = pytest.mark.timeout(240)

# Engines outlive trainers here, and versions never go backwards.
VERSIONS = itertools.count(1)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Weights = dict[str, torch.Tensor]


def numbered_rows(cfg: Config, version: int) -> Weights:
    """Version 0 is random; in version 1 every element of embedding row r is r + 1."""
    full = random_weights({**cfg, "tie_word_embeddings": True}, 1000)
    if version:
        vocab, hidden = full[EMBED].shape
        rows = torch.arange(1, vocab + 1, dtype=torch.bfloat16)
        full[EMBED] = rows[:, None].expand(vocab, hidden).contiguous()
    return full


def with_equal_head(cfg: Config, version: int) -> Weights:
    full = numbered_rows(cfg, version)
    return full | {HEAD: full[EMBED].clone()}


def head_of(rank: EngineRank) -> torch.Tensor:
    """Logits of one-hot hidden states, one per hidden dimension: ``[hidden, vocab]``."""
    model = rank.model
    head = model.lm_head
    return head.quant_method.apply(head, torch.eye(128, dtype=torch.bfloat16), None)


def expect_numbered_head(engine: Engine) -> None:
    logits = engine.ranks[0].ask("call", head_of)
    want = torch.arange(1, 101, dtype=torch.bfloat16).expand(128, 100)
    assert torch.equal(logits[:, :100], want)


def refit(engine: Engine, spec: TrainerSpec, **options: object) -> None:
    with Trainers(spec) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [engine], deadline_s=30, **options)
        for weights in (0, 1):
            version = next(VERSIONS)
            trainers.publish(version, weights)
            synchronizer.sync_weights(version)
        synchronizer.shutdown()


@pytest.fixture(scope="module")
def tied(oracle: Oracle) -> Iterator[Engine]:
    with Engine(oracle.random("tiny-tied", 0)) as engine:
        yield engine.ready()


@pytest.fixture(scope="module")
def untied(oracle: Oracle) -> Iterator[Engine]:
    with Engine(oracle.random("tiny", 0)) as engine:
        yield engine.ready()


def test_b06_head_that_aliases_the_embedding_is_refreshed(tied: Engine, oracle: Oracle) -> None:
    cfg = config("tiny-tied")
    refit(tied, TrainerSpec(cfg, weights=numbered_rows))
    expect_numbered_head(tied)
    folder = oracle.checkpoint("b06-alias", cfg, numbered_rows(cfg, 1))
    assert oracle.truth(folder, 1).differences(tied) == [[]]


def test_b06_separate_head_gets_the_tied_tensor_of_the_trainer(
    untied: Engine, oracle: Oracle
) -> None:
    cfg = config("tiny")
    refit(untied, TrainerSpec(cfg, weights=numbered_rows, tie=True))
    expect_numbered_head(untied)
    folder = oracle.checkpoint("b06-copy", cfg, with_equal_head(cfg, 1))
    assert oracle.truth(folder, 1).differences(untied) == [[]]


def test_b06_both_names_of_one_tensor_reach_a_tied_engine(tied: Engine, oracle: Oracle) -> None:
    cfg = config("tiny-tied")
    refit(tied, TrainerSpec(cfg, weights=numbered_rows, tie=True))
    expect_numbered_head(tied)


def test_b06_separate_head_without_a_source_is_refused(untied: Engine) -> None:
    before = untied.dump()
    with pytest.raises(CoverageError) as refused:
        refit(untied, TrainerSpec(config("tiny"), weights=numbered_rows))
    assert [name.split()[0] for name in refused.value.unwritten] == [HEAD]
    assert untied.dump() == before


def test_b06_a_head_of_its_own_for_a_tied_engine_is_refused_unless_declared(
    tied: Engine,
) -> None:
    spec = TrainerSpec(config("tiny-tied"), weights=with_equal_head)
    before = tied.dump()
    with pytest.raises(CoverageError) as refused:
        refit(tied, spec)
    assert [line.split()[0] for line in refused.value.disagreeing] == [HEAD]
    assert tied.dump() == before
    refit(tied, spec, not_trained=(HEAD,))
    expect_numbered_head(tied)


def test_b06_only_what_changed_in_the_trainer_changes_in_the_engine(tied: Engine) -> None:
    refit(tied, TrainerSpec(config("tiny-tied"), weights=numbered_rows))
    after = tied.dump()[0]
    with Trainers(TrainerSpec(config("tiny-tied"), weights=numbered_rows)) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [tied], deadline_s=30)
        version = next(VERSIONS)
        trainers.publish(version, 0)
        synchronizer.sync_weights(version)
    before = tied.dump()[0]
    changed = {name for name in after if before[name] != after[name]}
    assert changed == {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "forward of lm_head",
        "forward of model.embed_tokens",
    }
