"""Case B19: captured decode graphs read the new weights, where they always were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from bench.models import config
from tests.harness.gpu_engines import (
    GRAPHS,
    addresses,
    bits,
    changed,
    checkpoint,
    collect,
    greedy,
    model_of,
    start,
    worker_of,
)
from tests.harness.gpu_trainers import GpuTrainers
from weight_sync.engine import LocalLLM
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def recycle() -> None:
    """Fills a gigabyte of whatever memory is free, so that nothing freed keeps its old values."""
    torch.cuda.empty_cache()
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda").fill_(255)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


@pytest.mark.parametrize("model", ["tiny-moe", "tiny-tied"])
def test_decode_steps_of_graphs_follow_refits(
    trainer: GpuTrainers, model: str, tmp_path: Path
) -> None:
    cfg = config(model)
    llm = start(checkpoint(cfg, 0, tmp_path / "v0"), compilation_config=GRAPHS)
    disk, tokens = bits(model_of(llm)), greedy(llm)
    before = addresses(model_of(llm))
    seen = []
    with trainer.weights(cfg, "plain") as weights:
        sync = WeightSynchronizer(weights.infos, [LocalLLM(llm)], deadline_s=60)
        for version, values in ((1, 1), (2, 2), (3, 0)):
            weights.publish(version, values)
            assert sync.sync_weights(version).verified
            recycle()
            seen.append(greedy(llm))
            assert changed(before, addresses(model_of(llm))) == []
            if version == 2:
                assert without_graphs(llm) == seen[-1]
        sync.shutdown()
    assert changed(disk, bits(model_of(llm))) == []
    assert seen[2] == tokens
    assert seen[0] != seen[1] != tokens
    del llm
    collect()


def without_graphs(llm: object) -> list[list[int]]:
    """The same engine with the same weights, every decode step computed eagerly."""
    runner = worker_of(llm).model_runner
    dispatcher = getattr(runner, "cudagraph_dispatcher", None)
    if dispatcher is not None:
        assert dispatcher.cudagraph_mode.has_full_cudagraphs()
        assert any(dispatcher.cudagraph_keys.values())
        holder, switch = dispatcher, "keys_initialized"
    else:
        # vLLM's second model runner.
        assert runner.cudagraph_manager.graphs
        holder, switch = runner.cudagraph_manager, "_graphs_captured"
    assert getattr(holder, switch)
    setattr(holder, switch, False)
    try:
        return greedy(llm)
    finally:
        setattr(holder, switch, True)
