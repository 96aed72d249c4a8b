"""Expert routes of a real MoE engine through the facade, against routers computed by transformers.

Every engine of a fleet is the first of its process: vLLM 0.26 builds expert groups only with that.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from bench.models import Config, config
from generation.cluster import RayCluster
from generation.limits import Limits
from generation.routed_codec import decode_routed_experts
from generation.vllm_generation import VllmGeneration
from tests.harness.fleets import (
    NEW,
    WAIT_S,
    Fleet,
    Said,
    batch,
    checkpoint,
    prompts,
    said,
    settings,
)
from tests.harness.gpu_fleets import EARLY_TOKENS, START_S, await_tokens, generated, ray_with_gpus
from tests.harness.gpu_trainers import GpuTrainers
from tests.harness.router_oracle import RouterOracle

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CONFIG: Config = {**config("tiny-moe"), "eos_token_id": None}
LAYERS, EXPERTS, TOPK = 2, 8, 2
# Of trainers and of the checkpoint that the fleet starts from.
OLD = 0
TOKENS = 24
# Long enough for several refits to come before the end.
LONG = 230
# Of one step of the engine; longer prompts are computed in parts.
BUDGET = 64
PROMPT = prompts(1)[0]
IN_PARTS = prompts(1, length=BUDGET + 36)[0]


@dataclass(frozen=True)
class Routed:
    """A fleet of one MoE engine, and who knows what its routers choose, by weights."""

    fleet: Fleet
    oracles: dict[int, RouterOracle]


@dataclass(frozen=True)
class Answer:
    """One answer and its routes."""

    said: Said
    routes: torch.Tensor

    @property
    def sequence(self) -> list[int]:
        return self.said.prompt + self.said.tokens


@pytest.fixture(scope="module")
def routed(trainer: GpuTrainers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    folders: dict[int, Path] = {
        w: checkpoint(tmp_path_factory.mktemp(str(w)), w, CONFIG) for w in (OLD, NEW)
    }
    engine = {
        "async_engine": True,
        "expose_http_server": True,
        "http_server_api_key_required": True,
        "enable_return_routed_experts": True,
    }
    given = settings(
        folders[OLD],
        engine,
        max_new_tokens=LONG,
        vllm_kwargs={"max_num_batched_tokens": BUDGET},
    )
    with ray_with_gpus(1):
        cluster = RayCluster([1])
        gen = VllmGeneration(cluster, given, limits=Limits(load_s=START_S, call_s=WAIT_S))
        with trainer.weights(CONFIG, "plain") as weights:
            gen.prepare_refit_info(weights.infos)
            oracles = {w: RouterOracle(folder) for w, folder in folders.items()}
            # The trainer offers what those on the CPU offer.
            yield Routed(Fleet(gen, weights), oracles)  # type: ignore[arg-type]
            assert gen.shutdown() is True
        cluster.shutdown()


async def answered(gen: VllmGeneration, prompt: list[int], tokens: int = TOKENS) -> Answer:
    """One greedy request through the async facade."""
    asked = batch(prompt, max_new_tokens=[tokens])
    ((_, found),) = [pair async for pair in gen.generate_async(asked, greedy=True)]
    return Answer(said(prompt, found), found["routed_experts"][0])


def answer(gen: VllmGeneration, prompt: list[int]) -> Answer:
    return asyncio.run(asyncio.wait_for(answered(gen, prompt), WAIT_S))


def open_url(gen: VllmGeneration, url: str, body: object = None) -> bytes:
    """What the engine's own server answers."""
    headers = {"Authorization": f"Bearer {gen.http_api_key}", "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    # Whatever proxy the machine has is not for its own addresses.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, data, headers)
    with opener.open(request, timeout=WAIT_S) as reply:
        found: bytes = reply.read()
        return found


def chat(gen: VllmGeneration, prompt: list[int]) -> dict[str, Any]:
    """The only choice of a greedy chat answer."""
    body = {
        "model": gen.config.model_name,
        "messages": [{"role": "user", "content": " ".join(f"t{t}" for t in prompt)}],
        "temperature": 0,
        "max_tokens": TOKENS,
    }
    url = f"{gen.dp_openai_server_base_urls[0]}/chat/completions"
    (choice,) = json.loads(open_url(gen, url, body))["choices"]
    return choice


def cached_tokens(gen: VllmGeneration) -> float:
    """Prompt tokens that the engine took from its prefix cache so far."""
    base = str(gen.dp_openai_server_base_urls[0]).removesuffix("/v1")
    lines = open_url(gen, f"{base}/metrics").decode().splitlines()
    found = [line for line in lines if line.startswith("vllm:prefix_cache_hits_total")]
    assert found, "this vLLM has no such counter"
    return sum(float(line.split()[-1]) for line in found)


def check_form(answer: Answer) -> None:
    """One choice of distinct experts for every token in every layer but for the last token."""
    count = len(answer.sequence)
    assert (answer.routes.shape, answer.routes.dtype) == ((count, LAYERS, TOPK), torch.int16)
    known = answer.routes[:-1]
    assert 0 <= int(known.min()) <= int(known.max()) < EXPERTS
    assert (known[..., 0] != known[..., 1]).all()


def check_values(answer: Answer, oracle: RouterOracle) -> None:
    """The experts are those that the routers of these weights choose."""
    found = oracle.judge(answer.sequence, answer.routes[:-1])
    assert found.decided > len(answer.sequence) * LAYERS // 4, "too few to tell"
    assert found.wrong == 0, found


def test_a_chat_answer_carries_the_experts_that_the_routers_choose(routed: Routed):
    gen = routed.fleet.gen
    routed.fleet.refit(OLD)
    choice = chat(gen, PROMPT)
    message = choice["message"]
    assert message["prompt_token_ids"] == PROMPT
    assert len(message["generation_token_ids"]) == TOKENS
    words = Said(PROMPT, message["generation_token_ids"], [], [], 0)
    found = Answer(words, decode_routed_experts(message["routed_experts"]))
    check_form(found)
    check_values(found, routed.oracles[OLD])


def test_chat_routes_are_those_that_vllm_puts_beside_them(routed: Routed):
    """In a form of its own: an array file without a row for the last token."""
    choice = chat(routed.fleet.gen, PROMPT)
    theirs = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
    ours = decode_routed_experts(choice["message"]["routed_experts"])
    assert theirs.shape == (len(PROMPT) + TOKENS - 1, LAYERS, TOPK)
    assert np.array_equal(ours[:-1].numpy(), theirs)


def test_generated_batches_carry_the_routes_of_chat_answers(routed: Routed):
    found = answer(routed.fleet.gen, PROMPT)
    check_form(found)
    message = chat(routed.fleet.gen, PROMPT)["message"]
    assert message["generation_token_ids"] == found.said.tokens
    assert torch.equal(decode_routed_experts(message["routed_experts"]), found.routes)


def test_a_prompt_that_is_computed_in_parts_and_then_cached_has_all_its_routes(routed: Routed):
    routed.fleet.refit(OLD)  # drops what earlier tests cached
    before = cached_tokens(routed.fleet.gen)
    first = answer(routed.fleet.gen, IN_PARTS)
    assert cached_tokens(routed.fleet.gen) == before
    second = answer(routed.fleet.gen, IN_PARTS)
    assert cached_tokens(routed.fleet.gen) - before > BUDGET
    for found in (first, second):
        check_form(found)
        check_values(found, routed.oracles[OLD])


def test_after_a_refit_routes_are_those_of_the_new_weights(routed: Routed):
    """Also of a prompt that the engine had cached with its routes."""
    fleet = routed.fleet
    for weights, other in ((NEW, OLD), (OLD, NEW)):
        version = fleet.refit(weights)
        for prompt in (PROMPT, IN_PARTS):
            found = answer(fleet.gen, prompt)
            assert [s.weight_version for s in found.said.spans] == [version]
            check_form(found)
            check_values(found, routed.oracles[weights])
            away = routed.oracles[other].judge(found.sequence, found.routes[:-1])
            assert away.wrong > away.decided // 2


def test_routes_of_a_sequence_over_a_refit_change_with_its_weights(routed: Routed):
    """A token's route is that of the weights which read it, as its successor's version says."""
    fleet = routed.fleet
    fleet.refit(OLD)
    version = fleet.publish(NEW)

    async def streams() -> list[Answer]:
        before = generated(fleet.gen)
        running = [asyncio.create_task(answered(fleet.gen, p, LONG)) for p in prompts(4)]
        await asyncio.to_thread(await_tokens, fleet.gen, before, 4 * EARLY_TOKENS)
        (future,) = fleet.gen.update_weights_via_ipc_zmq(version=version)
        assert (await asyncio.wrap_future(future)).verified
        return await asyncio.gather(*running)

    answers = asyncio.run(asyncio.wait_for(streams(), WAIT_S))
    crossed = [a for a in answers if len(a.said.spans) == 2]
    assert crossed, [a.said.spans for a in answers]
    for found in crossed:
        check_form(found)
        # The row of the token that was read to make the first one of the new version.
        switch = len(found.said.prompt) + found.said.spans[1].start - 1
        old = routed.oracles[OLD].judge(found.sequence, found.routes[:switch])
        new = routed.oracles[NEW].judge(found.sequence, found.routes[:-1], start=switch)
        assert (old.wrong, new.wrong) == (0, 0)
        assert min(old.decided, new.decided) > 0
