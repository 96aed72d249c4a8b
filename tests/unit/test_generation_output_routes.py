"""Expert routes of generated sequences, from engine outputs to the trainer's batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from generation.batch import Batch
from generation.config import VllmConfig, VllmSpecificArgs
from generation.errors import EngineOutputError, GenerationConfigError
from generation.outputs import combine, completion_of, no_room

PROMPT, TOKENS = [4, 5, 6], [7, 8]


def routes(tokens: int) -> torch.Tensor:
    """Returns [tokens, 2 layers, topk 2] with distinct values."""
    return torch.arange(10, 10 + tokens * 4).reshape(tokens, 2, 2)


def request(found: Any) -> SimpleNamespace:
    output = SimpleNamespace(
        index=0,
        token_ids=TOKENS,
        text="",
        finish_reason="stop",
        logprobs=[{t: SimpleNamespace(logprob=-1.0)} for t in TOKENS],
        routed_experts=found,
    )
    return SimpleNamespace(request_id="r", prompt_token_ids=PROMPT, outputs=[output])


def test_every_token_but_the_last_has_its_route():
    # vLLM returns unsigned arrays.
    completion = completion_of(request(routes(4).to(torch.uint8).numpy()), 0, routed=True)
    assert completion.routes is not None
    assert completion.routes.dtype == torch.int16
    assert torch.equal(completion.routes[:4].long(), routes(4))
    assert completion.routes[4].tolist() == [[0, 1], [0, 1]]


def test_an_engine_that_returns_no_routes_is_refused_when_they_were_asked_for():
    with pytest.raises(EngineOutputError, match="request r has no expert routes"):
        completion_of(request(None), 0, routed=True)


def test_routes_that_nobody_asked_for_are_left_out():
    assert completion_of(request(routes(4)), 0).routes is None
    assert "routed_experts" not in combine([no_room(PROMPT)], 3, 0)


def test_batches_of_shards_join_although_one_generated_nothing():
    whole = combine([completion_of(request(routes(4)), 0, routed=True)], 3, 0, routed=True)
    parts = [whole, combine([no_room(PROMPT)], 3, 0, routed=True), combine([], 3, 0, routed=True)]
    first, second = Batch.concat(parts)["routed_experts"]
    assert torch.equal(first[:4].long(), routes(4))
    assert second is None


def test_routes_over_pipeline_stages_are_refused_before_anything_starts():
    engine = VllmSpecificArgs(1, 0.5, 64, 2, async_engine=True, enable_return_routed_experts=True)
    with pytest.raises(GenerationConfigError, match=r"needs vllm_cfg\.pipeline_parallel_size=1"):
        VllmConfig("model", 16, engine).check()
