"""Token usage of each generation call, handed to whatever telemetry the caller injects."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

logger = logging.getLogger(__name__)


class TelemetrySink(Protocol):
    """Receives one record per generation call while it is exporting."""

    @property
    def is_exporting(self) -> bool:
        """Whether records are wanted; nothing is computed otherwise."""
        ...

    def record_inference(
        self,
        *,
        provider: str,
        model: str,
        input_tokens: int | None,
        output_tokens: int | None,
        duration_s: float | None,
    ) -> None:
        """Takes the token counts and the duration in seconds of one call."""
        ...


class _WarnOnce:
    """A broken sink is worth one line, not one line per batch."""

    def __init__(self) -> None:
        self.done = False

    def __call__(self, error: Exception) -> None:
        if not self.done:
            self.done = True
            logger.warning("telemetry of generation failed and is not reported again: %r", error)


_warn_once = _WarnOnce()


def _record_vllm_generation_metrics(
    model_name: str | None,
    data: Mapping[str, Any],
    combined: Mapping[str, Any],
    batch_duration_s: float | None = None,
    *,
    sink: TelemetrySink | None = None,
) -> None:
    """Reports the tokens of one call to ``sink``; never raises, a failure is logged once.

    Args:
        model_name: Name of the served model.
        data: The request batch; ``input_lengths`` ``[samples]`` is summed when present.
        combined: The result batch; ``generation_lengths`` ``[samples]`` is summed when present.
        batch_duration_s: Wall-clock seconds of the call.
        sink: Where to report; None or one that is not exporting makes this a no-op.
    """
    try:
        if sink is None or not sink.is_exporting:
            return
        sink.record_inference(
            provider="vllm",
            model=model_name or "",
            input_tokens=_total(data, "input_lengths"),
            output_tokens=_total(combined, "generation_lengths"),
            duration_s=batch_duration_s,
        )
    except Exception as error:
        _warn_once(error)


def _total(batch: Mapping[str, Any], column: str) -> int | None:
    return int(batch[column].sum()) if column in batch else None
