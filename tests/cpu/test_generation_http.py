"""HTTP: the key on every route, tokens and stamps on answers, capture, router under load."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import aiohttp
import pytest

from generation.router import GenerationRouter
from generation.token_capture import in_memory_sink
from tests.harness.fleets import WAIT_S, Fleet, FreshEngine, Said, ask, prompts
from weight_sync.errors import EngineStateError

if TYPE_CHECKING:
    from generation_fixtures import Started

pytest_plugins = ["generation_fixtures"]
pytestmark = pytest.mark.timeout(240)

ROUTES = (
    ("GET", "/v1/models"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/tokenize"),
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/nothing"),
)


async def _call(
    method: str, url: str, body: object, key: str | None
) -> tuple[int, dict[str, str], object]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = aiohttp.ClientTimeout(total=WAIT_S)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.request(method, url, json=body, headers=headers) as reply,
    ):
        text = reply.content_type == "application/json"
        return reply.status, dict(reply.headers), await (reply.json() if text else reply.text())


def call(method: str, url: str, body: object = None, key: str | None = None):
    return asyncio.run(_call(method, url, body, key))


def chat(fleet: Fleet, tokens: list[int], length: int = 20) -> dict[str, object]:
    return {
        "model": fleet.gen.config.model_name,
        "messages": [{"role": "user", "content": " ".join(f"t{t}" for t in tokens)}],
        "temperature": 0,
        "max_tokens": length,
    }


def answer_of(body: dict, prompt: list[int]) -> Said:
    message = body["choices"][0]["message"]
    assert message["prompt_token_ids"] == prompt
    return Said(prompt, message["generation_token_ids"], message["generation_log_probs"], [], -1)


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("key", [None, "guess"])
def test_no_route_answers_without_the_key(fleet: Fleet, method: str, path: str, key: str | None):
    base = fleet.gen.dp_openai_server_base_urls[0].removesuffix("/v1")
    status, headers, _ = call(method, base + path, {} if method == "POST" else None, key)
    assert status == 401
    assert headers["WWW-Authenticate"] == "Bearer"


def test_addresses_of_a_deferred_start_are_those_that_serve_once_it_is_loaded(started: Started):
    assert len(set(started.reserved)) == 2
    assert None not in started.reserved
    assert started.served == started.reserved


def test_the_key_opens_the_server_and_is_in_no_config(fleet: Fleet):
    key = fleet.gen.http_api_key
    base = fleet.gen.dp_openai_server_base_urls[0]
    assert call("GET", f"{base}/models", key=key)[0] == 200
    assert key not in str(fleet.gen.config.to_dict())
    assert key not in repr(fleet.gen.config)


def test_a_chat_answer_carries_tokens_logprobs_and_versions(fleet: Fleet, fresh: FreshEngine):
    version = fleet.refit()
    base = fleet.gen.dp_openai_server_base_urls[1]
    prompt = prompts(1)[0]
    status, headers, body = call(
        "POST", f"{base}/chat/completions", chat(fleet, prompt), fleet.gen.http_api_key
    )
    assert status == 200
    assert headers["x-weight-version"] == str(version)
    assert not fresh.off([answer_of(body, prompt)])
    spans = body["choices"][0]["message"]["weight_versions"]
    assert spans == [{"start": 0, "stop": 20, "version": version}]


def test_a_stream_over_a_refit_carries_the_versions_at_its_begin_and_end(fleet: Fleet):
    old = fleet.refit()
    base = fleet.gen.dp_openai_server_base_urls[0]
    body = {**chat(fleet, prompts(1)[0], 400), "stream": True}

    async def stream() -> tuple[str, bytes, int]:
        headers = {"Authorization": f"Bearer {fleet.gen.http_api_key}"}
        timeout = aiohttp.ClientTimeout(total=WAIT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
            session.post(f"{base}/chat/completions", json=body) as reply,
        ):
            await reply.content.readany()
            new = await asyncio.to_thread(fleet.refit)
            return reply.headers["x-weight-version"], await reply.read(), new

    first, text, new = asyncio.run(stream())
    assert first == str(old)
    assert text.endswith(f"data: [DONE]\n\n: x-weight-version-at-end {new}\n\n".encode())


def test_tokenize_serves_at_its_bare_path(fleet: Fleet):
    base = fleet.gen.dp_openai_server_base_urls[0].removesuffix("/v1")
    body = {"model": fleet.gen.config.model_name, "prompt": "t5 t6"}
    status, _, found = call("POST", f"{base}/tokenize", body, fleet.gen.http_api_key)
    assert status == 200
    assert found["tokens"] == [5, 6]


def test_every_request_is_captured_once_with_its_version(fleet: Fleet):
    fleet.gen.setup_token_capture(in_memory_sink)
    version = fleet.refit()
    prompt = prompts(1)[0]
    direct = ask(fleet.gen, prompt)
    base = fleet.gen.dp_openai_server_base_urls[0]
    for stream in (False, True):
        body = {**chat(fleet, prompt), "stream": stream}
        assert call("POST", f"{base}/chat/completions", body, fleet.gen.http_api_key)[0] == 200
    records = fleet.gen.drain_captured()
    lengths = Counter(len(r.generation_token_ids) for r in records)
    assert lengths == {len(direct.tokens): 1, 20: 2}
    for record in records:
        assert record.prompt_token_ids == prompt
        assert record.generation_token_ids == direct.tokens[: len(record.generation_token_ids)]
        assert {s.weight_version for s in record.version_spans} == {version}
    with pytest.raises(EngineStateError, match="installed already"):
        fleet.gen.setup_token_capture(in_memory_sink)


def test_a_rollout_version_is_stamped_on_later_tokens(fleet: Fleet):
    fleet.gen.set_rollout_weight_version(fleet.version + 1000)
    assert [s.weight_version for s in ask(fleet.gen, [3]).spans] == [fleet.version + 1000]
    version = fleet.refit()
    assert [s.weight_version for s in ask(fleet.gen, [3]).spans] == [version]


@pytest.fixture
def router(fleet: Fleet) -> Iterator[GenerationRouter]:
    router = GenerationRouter(
        api_key="router-key",
        backend_api_key=fleet.gen.http_api_key,
        metrics=fleet.gen.prometheus,
    )
    router.set_backends(fleet.gen.dp_openai_server_base_urls)
    router.start()
    yield router
    router.close()


def test_streams_through_the_router_survive_many_refits(
    fleet: Fleet, router: GenerationRouter, capsys: pytest.CaptureFixture[str]
):
    streams, refits = 64, 20
    first = fleet.refit()
    stop = False
    latest = first
    stalls: list[float] = []
    wrong: list[str] = []

    async def stream(session: aiohttp.ClientSession, prompt: list[int]) -> int:
        done = 0
        while not stop:
            floor = latest
            url = f"{router.base_url}/chat/completions"
            async with session.post(url, json=chat(fleet, prompt, 30)) as reply:
                body = await reply.json()
            if reply.status != 200:
                wrong.append(f"{reply.status} {body}")
                return done
            spans = body["choices"][0]["message"]["weight_versions"]
            versions = [s["version"] for s in spans]
            tokens = spans[-1]["stop"]
            if tokens != 30 or versions != sorted(set(versions)) or versions[0] < floor:
                wrong.append(f"{spans} asked at {floor}")
            done += 1
        return done

    async def everything() -> list[int]:
        nonlocal stop, latest
        headers = {"Authorization": "Bearer router-key"}
        timeout = aiohttp.ClientTimeout(total=WAIT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            headers=headers, timeout=timeout, connector=connector
        ) as session:
            tasks = [asyncio.create_task(stream(session, p)) for p in prompts(streams)]
            await asyncio.sleep(0.5)
            for _ in range(refits):
                version = await asyncio.to_thread(fleet.publish)
                (future,) = fleet.gen.update_weights_via_ipc_zmq(version=version)
                report = await asyncio.wrap_future(future)
                stalls.append(report.pause_seconds)
                latest = version
            stop = True
            return await asyncio.gather(*tasks)

    begin = time.perf_counter()
    served = asyncio.run(everything())
    assert not wrong
    assert all(served)
    worst = sorted(stalls)[int(0.99 * (len(stalls) - 1))]
    with capsys.disabled():
        print(
            f"\n{sum(served)} answers over {refits} refits in {time.perf_counter() - begin:.1f} s, "
            f"p99 stall {worst * 1e3:.0f} ms"
        )


def test_the_router_serves_the_fleets_counters(fleet: Fleet, router: GenerationRouter):
    ask(fleet.gen, [3])
    url = router.base_url.removesuffix("/v1") + "/metrics"
    status, _, text = call("GET", url, key="router-key")
    assert status == 200
    (line,) = [t for t in str(text).splitlines() if t.startswith("vllm:generation_tokens ")]
    assert float(line.split()[1]) >= fleet.gen.config.max_new_tokens
