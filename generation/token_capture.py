"""Stands at an engine's ``generate``: stamps and records every request, whoever sent it."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

from generation.capture import CaptureRecord, CaptureSink, InMemorySink
from generation.chat import _generated
from generation.errors import InvalidRolloutError
from generation.outputs import version_spans
from generation.version_book import VersionBook
from weight_sync.errors import EngineStateError

Generate = Callable[..., AsyncIterator[Any]]


class TokenCapture:
    """Stands between an engine and whoever calls its ``generate``.

    Args:
        version: Gives the present weight version.
        book: Knows the versions of earlier tokens, for engines that report none themselves.
    """

    def __init__(self, version: Callable[[], int], book: VersionBook) -> None:
        self._version = version
        self._book = book
        self.sink: CaptureSink | None = None

    def install(self, sink: CaptureSink) -> None:
        """Records from now on; exactly one sink at a time.

        Raises:
            EngineStateError: There is one already.
        """
        if self.sink is not None:
            raise EngineStateError(
                "token capture is installed already; every token would be recorded twice"
            )
        self.sink = sink

    def remove(self) -> None:
        """Stops recording and closes the sink; safe twice."""
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.close()

    def around(self, generate: Generate) -> Generate:
        """Returns ``generate`` with log-probabilities always on and versions on every final output.

        Every finish is recorded while a sink is installed.
        """

        async def watched(
            prompt: object,
            sampling_params: Any,  # noqa: ANN401 - vLLM's class
            request_id: str,
            *args: object,
            **kwargs: object,
        ) -> AsyncIterator[Any]:
            if getattr(sampling_params, "logprobs", 0) is None:
                sampling_params = sampling_params.clone()
                sampling_params.logprobs = 0
            parts: dict[int, _Parts] = {}
            async for output in generate(prompt, sampling_params, request_id, *args, **kwargs):
                if output.finished:
                    self._stamp(output, sampling_params, request_id)
                if self.sink is not None and hasattr(sampling_params, "output_kind"):
                    self._watch(output, sampling_params, request_id, parts)
                yield output

        return watched

    def _stamp(
        self,
        output: Any,  # noqa: ANN401 - vLLM's class
        sampling_params: Any,  # noqa: ANN401 - vLLM's class
        request_id: str,
    ) -> None:
        """Adds weight versions where the engine knows none."""
        for completion in getattr(output, "outputs", ()):
            if not hasattr(completion, "token_ids") or hasattr(completion, "weight_versions"):
                continue
            if sampling_params.n != 1:
                raise InvalidRolloutError(
                    "this vLLM reports no weight versions, so n must be 1; send n requests"
                )
            spans = self._book.spans(request_id, len(completion.token_ids), self._version())
            completion.weight_versions = [
                _Span(str(s.weight_version), s.start, s.stop) for s in spans
            ]

    def _watch(
        self,
        output: Any,  # noqa: ANN401 - vLLM's class
        sampling_params: Any,  # noqa: ANN401 - vLLM's class
        request_id: str,
        parts: dict[int, _Parts],
    ) -> None:
        from vllm.sampling_params import RequestOutputKind

        delta = sampling_params.output_kind == RequestOutputKind.DELTA
        for completion in output.outputs:
            tokens, logprobs = _generated(completion.index, completion)
            part = parts.setdefault(completion.index, _Parts())
            part.add(tokens, logprobs, replace=not delta)
            if completion.finish_reason is None or self.sink is None:
                continue
            name = request_id if sampling_params.n == 1 else f"{request_id}-{completion.index}"
            self.sink.record(
                CaptureRecord(
                    request_id=name,
                    prompt_token_ids=list(output.prompt_token_ids or []),
                    generation_token_ids=part.tokens,
                    generation_logprobs=part.logprobs,
                    version_spans=version_spans(completion, len(part.tokens), self._version()),
                )
            )


@dataclasses.dataclass(frozen=True)
class _Span:
    """A version span in the form that newer engines report."""

    version: str
    start: int
    end: int


class _Parts:
    """What came of one completion so far: streamed requests deliver it in pieces."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[float] = []

    def add(self, tokens: list[int], logprobs: list[float], *, replace: bool) -> None:
        if replace:
            self.tokens, self.logprobs = list(tokens), list(logprobs)
        else:
            self.tokens += tokens
            self.logprobs += logprobs


def in_memory_sink(shard: int) -> CaptureSink:
    """Makes a sink that :meth:`VllmGeneration.drain_captured` reads."""
    return InMemorySink()


def drain_records(sink: CaptureSink | None) -> list[CaptureRecord]:
    """Returns and forgets the records of an in-memory sink.

    Raises:
        EngineStateError: There is no sink, or one that keeps nothing to drain.
    """
    if not isinstance(sink, InMemorySink):
        raise EngineStateError(
            "only an in-memory sink can be drained; install one with "
            "setup_token_capture(in_memory_sink), or read where the installed sink writes"
        )
    return sink.drain()
