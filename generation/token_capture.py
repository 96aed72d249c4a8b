"""Stands at an engine's ``generate``: stamps and records every request, whoever sent it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from generation.capture import CaptureRecord, CaptureSink, InMemorySink
from generation.chat import _generated
from generation.errors import InvalidRolloutError
from generation.outputs import version_spans
from generation.version_book import VersionBook
from weight_sync.errors import EngineStateError

logger = logging.getLogger(__name__)

Generate = Callable[..., AsyncIterator[Any]]


class TokenCapture:
    """Stands between an engine and whoever calls its ``generate``.

    Args:
        version: Gives the present weight version.
        book: Knows the versions of earlier tokens, for engines that report none themselves.

    Attributes:
        lost: Records that could not be stored, all sinks together; each was logged.
    """

    def __init__(self, version: Callable[[], int], book: VersionBook) -> None:
        self._version = version
        self._book = book
        self.sink: CaptureSink | None = None
        self.lost = 0

    def install(self, sink: CaptureSink) -> None:
        """Records requests that begin from now on; exactly one sink at a time.

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

        A request is recorded in the sink that was there when it began and still is when it ends. A
        record that cannot be stored is counted and logged; whoever asked gets the answer anyway.
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
            # Of a request that runs already, the tokens so far are gone.
            sink = self.sink if hasattr(sampling_params, "output_kind") else None
            parts: dict[int, _Parts | None] = {}
            async for output in generate(prompt, sampling_params, request_id, *args, **kwargs):
                if output.finished:
                    self._stamp(output, sampling_params, request_id)
                if sink is not None and sink is self.sink:
                    for completion in output.outputs:
                        try:
                            self._watch(output, completion, sampling_params, request_id, parts)
                        except Exception as error:  # a sink may raise anything
                            parts[completion.index] = None
                            self._lose(request_id, error)
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
        completion: Any,  # noqa: ANN401 - vLLM's class
        sampling_params: Any,  # noqa: ANN401 - vLLM's class
        request_id: str,
        parts: dict[int, _Parts | None],
    ) -> None:
        from vllm.sampling_params import RequestOutputKind

        part = parts.setdefault(completion.index, _Parts())
        if part is None:  # lost already
            return
        tokens, logprobs = _generated(completion.index, completion)
        delta = sampling_params.output_kind == RequestOutputKind.DELTA
        part.add(tokens, logprobs, replace=not delta)
        if completion.finish_reason is None or self.sink is None:
            return
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

    def _lose(self, request_id: str, error: Exception) -> None:
        self.lost += 1
        logger.error(
            "request %s is not captured (%d lost so far): %s: %s",
            request_id,
            self.lost,
            type(error).__name__,
            error,
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
