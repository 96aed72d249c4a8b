"""Samples an engine's gauges in the background, for curves of load and cache use over a step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

logger = logging.getLogger(__name__)

# Series of the facade -> series of vLLM.
SERIES = {
    "inflight_batch_sizes": "vllm:num_requests_running",
    "num_pending_samples": "vllm:num_requests_waiting",
    "kv_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "generation_tokens": "vllm:generation_tokens",
}


def _vllm_metrics() -> Iterable[Any]:
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return get_metrics_snapshot()


class MetricsSampler:
    """Reads the gauges every ``interval_s`` seconds in a thread of its own.

    Args:
        interval_s: Seconds between samples, above 0.
        metrics: Where metrics come from; objects with a name and a value.
    """

    def __init__(
        self, interval_s: float, metrics: Callable[[], Iterable[Any]] = _vllm_metrics
    ) -> None:
        self._interval_s = interval_s
        self._metrics = metrics
        self._lock = threading.Lock()
        self._history: dict[str, list[float]] = {name: [] for name in SERIES}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vllm-metrics-logger", daemon=True)

    def start(self) -> None:
        """Begins to sample."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread; safe twice."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(self._interval_s + 5.0)

    def read(self, *, latest: bool, clear: bool) -> dict[str, list[float]]:
        """Returns samples by series, without empty ones.

        Args:
            latest: Only the last value of each.
            clear: Forget what was sampled so far, in the same step.
        """
        with self._lock:
            found = {n: v[-1:] if latest else list(v) for n, v in self._history.items() if v}
            if clear:
                self._history = {name: [] for name in SERIES}
            return found

    def sample(self) -> None:
        """Takes one sample of every series."""
        values: dict[str, float] = {}
        for metric in self._metrics():
            if hasattr(metric, "value"):
                values[metric.name] = values.get(metric.name, 0.0) + float(metric.value)
        with self._lock:
            for name, series in SERIES.items():
                if series in values:
                    self._history[name].append(values[series])

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self.sample()
            except Exception:  # a sampler that fails must not take the engine with it
                logger.exception("sampling engine metrics failed; sampling ends")
                return
