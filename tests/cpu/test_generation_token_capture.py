"""Token capture around a stream of vLLM's own outputs: it never gets in the stream's way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind

from generation.capture import CaptureRecord, InMemorySink, JsonLinesSink
from generation.token_capture import TokenCapture
from generation.version_book import VersionBook

TOKENS = (5, 6, 7)


class Full:
    """A sink that stores nothing."""

    def record(self, record: CaptureRecord) -> None:
        raise OSError("no space left")

    def close(self) -> None:
        """Nothing is open."""


def output(
    tokens: list[int],
    finished: bool,
    logprobs: bool,
    indices: tuple[int, ...],
    spans: list[WeightVersionSpan] | None,
) -> RequestOutput:
    completions = [
        CompletionOutput(
            index=index,
            text="",
            token_ids=tokens,
            cumulative_logprob=None,
            logprobs=[{t: Logprob(-1.0)} for t in tokens] if logprobs else None,
            finish_reason="length" if finished else None,
            weight_versions=spans if finished else None,
        )
        for index in indices
    ]
    return RequestOutput(
        request_id="r",
        prompt="",
        prompt_token_ids=[1],
        prompt_logprobs=None,
        outputs=completions,
        finished=finished,
    )


def stream(
    capture: TokenCapture,
    name: str = "r",
    *,
    logprobs: bool = True,
    indices: tuple[int, ...] = (0,),
    spans: list[WeightVersionSpan] | None = None,
) -> AsyncIterator[RequestOutput]:
    """A request that is delivered token by token."""

    async def generate(
        prompt: object, params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        for token in TOKENS:
            yield output([token], token == TOKENS[-1], logprobs, indices, spans)

    params = SamplingParams(output_kind=RequestOutputKind.DELTA, logprobs=0, n=len(indices))
    return capture.around(generate)("p", params, name)


def new_capture() -> TokenCapture:
    return TokenCapture(lambda: 3, VersionBook())


async def delivered(
    request: AsyncIterator[RequestOutput], after_first: Callable[[], None] = lambda: None
) -> list[int]:
    """Reads a stream to its end, doing something after its first token."""
    found = list((await anext(request)).outputs[0].token_ids)
    after_first()
    return found + [t async for o in request for t in o.outputs[0].token_ids]


def run(
    request: AsyncIterator[RequestOutput], after_first: Callable[[], None] = lambda: None
) -> list[int]:
    return asyncio.run(delivered(request, after_first))


def test_a_stream_that_began_before_the_installation_ends_untouched_and_unrecorded():
    capture, sink = new_capture(), InMemorySink()
    assert run(stream(capture), lambda: capture.install(sink)) == list(TOKENS)
    assert (sink.drain(), capture.lost) == ([], 0)


def test_a_stream_that_began_after_the_installation_is_recorded_whole():
    capture, sink = new_capture(), InMemorySink()
    capture.install(sink)
    run(stream(capture))
    assert [r.generation_token_ids for r in sink.drain()] == [list(TOKENS)]


def test_a_stream_that_outlives_its_sink_is_not_recorded_in_the_next_one():
    capture, sink = new_capture(), InMemorySink()
    capture.install(InMemorySink())

    def other() -> None:
        capture.remove()
        capture.install(sink)

    assert run(stream(capture), other) == list(TOKENS)
    assert (sink.drain(), capture.lost) == ([], 0)


def test_a_record_that_the_sink_cannot_store_is_counted_and_the_request_answered(
    caplog: pytest.LogCaptureFixture,
):
    capture = new_capture()
    capture.install(Full())
    with caplog.at_level(logging.ERROR):
        assert run(stream(capture, "first")) == list(TOKENS)
        assert run(stream(capture, "second")) == list(TOKENS)
    assert capture.lost == 2
    assert [r.getMessage() for r in caplog.records] == [
        "request first is not captured (1 lost so far): OSError: no space left",
        "request second is not captured (2 lost so far): OSError: no space left",
    ]


def test_a_closed_file_does_not_end_a_request(tmp_path):
    capture = new_capture()
    sink = JsonLinesSink(tmp_path / "capture.jsonl")
    capture.install(sink)
    assert run(stream(capture), sink.close) == list(TOKENS)
    assert capture.lost == 1


def test_an_output_without_logprobs_is_counted_once_and_delivered():
    capture, sink = new_capture(), InMemorySink()
    capture.install(sink)
    assert run(stream(capture, logprobs=False)) == list(TOKENS)
    assert (sink.drain(), capture.lost) == ([], 1)


def test_a_version_that_goes_back_in_flight_is_counted_and_the_request_answered():
    capture, sink = new_capture(), InMemorySink()
    capture.install(sink)
    spans = [WeightVersionSpan("3", 0, 1), WeightVersionSpan("2", 1, 3)]
    assert run(stream(capture, spans=spans)) == list(TOKENS)
    assert (sink.drain(), capture.lost) == ([], 1)


def test_every_completion_of_a_request_that_is_not_stored_is_counted():
    capture = new_capture()
    capture.install(Full())
    run(stream(capture, indices=(0, 1)))
    assert capture.lost == 2
