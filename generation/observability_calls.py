"""Token capture, metrics and profiling of the fleet."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from generation.answers import values_or_raise
from generation.capture import CaptureRecord, CaptureSink
from generation.fleet_calls import FleetCalls
from generation.metrics import (
    aggregate_spec_decode_counters,
    compute_engine_step_metrics,
    compute_spec_decode_metrics,
)
from generation.metrics_sampler import SERIES
from generation.prometheus import prometheus_text

CounterTotals = dict[str | tuple[str, int], float]


class ObservabilityCalls(FleetCalls):
    """Capture, metrics and profiling of the facade."""

    _step_start: CounterTotals | None = None

    # --- token capture --------------------------------------------------------------------------

    def setup_token_capture(self, make_sink: Callable[[int], CaptureSink]) -> None:
        """Records every request that begins from now on, over HTTP or through this facade.

        What a sink cannot store is counted and logged by its shard, and fails no request.

        Args:
            make_sink: Called once in every shard's actor with the shard's number, also in
                replacements; must be importable there, e.g. ``in_memory_sink``.

        Raises:
            FleetStateError: The engines are sync.
            EngineStateError: Capture is installed already.
        """
        self._require_async("setup_token_capture()")
        values_or_raise(
            self.pool.ask(
                self.roster.alive(), "install_capture", make_sink, timeout_s=self.limits.call_s
            )
        )
        self._make_sink = make_sink

    def drain_captured(self) -> list[CaptureRecord]:
        """Returns and forgets what in-memory sinks of all living shards recorded.

        Raises:
            EngineStateError: The installed sink keeps nothing to drain, or none is installed.
        """
        self._require_async("drain_captured()")
        answers = self.pool.ask(self.roster.alive(), "drain_captured", timeout_s=self.limits.call_s)
        found = values_or_raise(answers)
        return [record for shard in sorted(found) for record in found[shard]]

    def set_rollout_weight_version(self, version: int) -> None:
        """Stamps later tokens with ``version`` on every living shard; waits until all do.

        Refits do so by themselves. A label is no proof: an engine that waits for its first refit
        still serves nothing.
        """
        values_or_raise(
            self.pool.ask(self.roster.alive(), "set_label", version, timeout_s=self.limits.call_s)
        )
        self._label = version

    # --- step metrics ---------------------------------------------------------------------------

    def _get_raw_spec_counters(self) -> CounterTotals:
        """Returns the counters of all living shards, summed."""
        answers = self.pool.ask(self.roster.alive(), "counters", timeout_s=self.limits.call_s)
        return aggregate_spec_decode_counters(values_or_raise(answers).values())

    def snapshot_step_metrics(self) -> None:
        """Marks the begin of a step; warns when the one before was never read."""
        if self._step_start is not None:
            warnings.warn(
                "snapshot_step_metrics() was called twice without get_step_metrics(); the first "
                "step's metrics are lost",
                RuntimeWarning,
                stacklevel=2,
            )
        self._step_start = self._get_raw_spec_counters()

    def get_step_metrics(self) -> dict[str, float]:
        """Returns speculative decoding and engine metrics since the snapshot, and forgets it.

        Returns:
            ``vllm/...`` names; ``{}`` with a warning when there was no snapshot.
        """
        start, self._step_start = self._step_start, None
        if start is None:
            warnings.warn(
                "get_step_metrics() without snapshot_step_metrics(); call it when the step begins",
                RuntimeWarning,
                stacklevel=2,
            )
            return {}
        end = self._get_raw_spec_counters()
        return compute_spec_decode_metrics(start, end) | compute_engine_step_metrics(start, end)

    # --- logger metrics -------------------------------------------------------------------------

    def _collect_vllm_logger_metrics(
        self, *, latest: bool, clear: bool
    ) -> dict[str, dict[int, list[float]]]:
        """Returns sampled series by name and shard; empty ones are left out."""
        engine = self.config.vllm_cfg
        if not (engine.enable_vllm_metrics_logger and engine.async_engine):
            return {}
        answers = self.pool.ask(
            self.roster.alive(), "logger_metrics", latest, clear, timeout_s=self.limits.call_s
        )
        found = values_or_raise(answers)
        return {
            name: {shard: series[name] for shard, series in found.items() if name in series}
            for name in SERIES
        }

    def get_vllm_logger_metrics(self) -> dict[str, dict[int, list[float]]]:
        """Returns the whole history of every sampled series, by name and shard."""
        return self._collect_vllm_logger_metrics(latest=False, clear=False)

    def drain_latest_vllm_logger_metrics(self) -> dict[str, dict[int, list[float]]]:
        """Returns the last value of every series and forgets the history."""
        return self._collect_vllm_logger_metrics(latest=True, clear=True)

    def clear_vllm_logger_metrics(self) -> None:
        """Forgets the history."""
        self._collect_vllm_logger_metrics(latest=True, clear=True)

    get_logger_metrics = get_vllm_logger_metrics
    drain_latest_logger_metrics = drain_latest_vllm_logger_metrics
    clear_logger_metrics = clear_vllm_logger_metrics

    def prometheus(self) -> str:
        """Returns the fleet's counters, and its health where a monitor is attached, as text for a
        Prometheus endpoint; pass it as ``metrics`` to :class:`GenerationRouter`."""
        totals: dict[str, float] = {}
        for key, value in self._get_raw_spec_counters().items():
            totals[key if isinstance(key, str) else f"{key[0]}_{key[1]}"] = value
        if self.roster.monitor is not None:
            totals |= self.roster.monitor.as_metrics()
        return prometheus_text(totals)

    # --- profiling ------------------------------------------------------------------------------

    def start_gpu_profiling(self) -> None:
        """Starts the profilers of all workers.

        Raises:
            ConfigError: No profiler is configured.
        """
        self._profile(True)

    def stop_gpu_profiling(self) -> None:
        """Stops the profilers of all workers; they write their traces now.

        Raises:
            ConfigError: No profiler is configured.
        """
        self._profile(False)

    def _profile(self, start: bool) -> None:
        answers: dict[int, Any] = self.pool.ask(
            self.roster.alive(), "profile", start, timeout_s=self.limits.call_s
        )
        values_or_raise(answers)
