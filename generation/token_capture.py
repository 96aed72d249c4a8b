"""Records every request an engine finishes, whoever sent it, with its tokens' weight versions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from generation.capture import CaptureRecord, CaptureSink, InMemorySink
from generation.chat import _generated
from generation.outputs import version_spans
from weight_sync.errors import EngineStateError

Generate = Callable[..., AsyncIterator[Any]]


class TokenCapture:
    """Stands between an engine and whoever calls its ``generate``.

    Args:
        version: Gives the weight version of an engine that reports none itself.
    """

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version
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
        """Returns ``generate`` with log-probabilities always on and every finish recorded."""

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
                if self.sink is not None and hasattr(sampling_params, "output_kind"):
                    self._watch(output, sampling_params, request_id, parts)
                yield output

        return watched

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
