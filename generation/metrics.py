"""Step metrics of the fleet from two snapshots of the engines' own counters.

A worker hands over a flat dict of numbers. Labels and the parts of a histogram are folded into the
key (``name|part``), so that a plain sum over workers is the fleet's total.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

COUNTER_KEY_SEP = "|"
HISTOGRAM_SUM_PART = "sum"
HISTOGRAM_COUNT_PART = "count"

Counters = Mapping[str | tuple[str, int], float]

_SPEC_DECODE_PREFIX = "vllm:spec_decode_"
_REASON_LABEL = "finished_reason"
# An engine that ended a request by itself delivered an output; the other reasons (abort, error)
# did not. vLLM reports no aborted request here (vllm#31503), so failures are a lower bound.
_DELIVERED_REASONS = frozenset({"stop", "length", "repetition"})


def _variants(name: str) -> tuple[str, ...]:
    """Both spellings: Prometheus clients append ``_total`` to counters, vLLM's reader does not."""
    return (f"vllm:{name}", f"vllm:{name}_total")


_PROMPT_TOKENS = _variants("prompt_tokens")
_GENERATION_TOKENS = _variants("generation_tokens")
_PREEMPTIONS = _variants("num_preemptions")
_REQUEST_SUCCESS = _variants("request_success")
_PROMPT_LENGTHS = ("vllm:request_prompt_tokens",)
_GENERATION_LENGTHS = ("vllm:request_generation_tokens",)

# Whole names, not prefixes: vLLM has siblings such as prompt_tokens_by_source.
_KEPT_COUNTER_NAMES = (
    _PROMPT_TOKENS
    + _GENERATION_TOKENS
    + _PREEMPTIONS
    + _REQUEST_SUCCESS
    + _PROMPT_LENGTHS
    + _GENERATION_LENGTHS
)


def encode_counter_key(name: str, part: str) -> str:
    """Joins a series name and a histogram part or label into one key, injectively.

    Raises:
        ValueError: ``name`` holds the separator, so two pairs could give the same key.
    """
    if COUNTER_KEY_SEP in name:
        raise ValueError(f"a series name cannot contain {COUNTER_KEY_SEP!r}: {name!r}")
    return f"{name}{COUNTER_KEY_SEP}{part}"


def _is_kept(name: str) -> bool:
    """Tells whether a snapshot key belongs to a series that is read here."""
    base = name.split(COUNTER_KEY_SEP, 1)[0]
    return base.startswith(_SPEC_DECODE_PREFIX) or base in _KEPT_COUNTER_NAMES


def flatten_engine_metrics(metrics: Iterable[Any]) -> dict[str, float | list[float]]:
    """Turns the objects of vLLM's ``get_metrics()`` into one worker's flat snapshot.

    Counters give a number, vectors a list, histograms their sum and count; series of several
    engines or labels add up. Gauges and everything that is not read here are dropped.
    """
    flat: dict[str, float | list[float]] = {}
    for metric in metrics:
        if not _is_kept(metric.name):
            continue
        if hasattr(metric, "values"):
            before = flat.get(metric.name)
            known = before if isinstance(before, list) else [0.0] * len(metric.values)
            flat[metric.name] = [a + float(b) for a, b in zip(known, metric.values, strict=True)]
        elif hasattr(metric, "buckets"):
            _add(flat, encode_counter_key(metric.name, HISTOGRAM_SUM_PART), metric.sum)
            _add(flat, encode_counter_key(metric.name, HISTOGRAM_COUNT_PART), metric.count)
        else:
            reason = metric.labels.get(_REASON_LABEL)
            key = metric.name
            if reason is not None:
                key = encode_counter_key(key, f"{_REASON_LABEL}={reason}")
            _add(flat, key, metric.value)
    return flat


def _add(flat: dict[str, float | list[float]], key: str, value: float) -> None:
    before = flat.get(key, 0.0)
    flat[key] = (before if isinstance(before, float) else 0.0) + float(value)


def aggregate_spec_decode_counters(
    worker_metrics: Iterable[Mapping[str, float | list[float]]],
) -> dict[str | tuple[str, int], float]:
    """Sums the snapshots of all workers.

    Returns:
        Series name to total; per-position lists become ``(name, position)`` keys, from 1. Series
        that are not read here are dropped.
    """
    totals: dict[str | tuple[str, int], float] = defaultdict(float)
    for report in worker_metrics:
        for name, value in report.items():
            if not _is_kept(name):
                continue
            if isinstance(value, list):
                for position, at in enumerate(value, start=1):
                    totals[name, position] += at
            else:
                totals[name] += value
    return dict(totals)


def _first_delta(
    delta: Counters, candidates: tuple[str, ...], part: str | None = None
) -> float | None:
    """Returns the value of the first candidate that is present, else None."""
    for name in candidates:
        key = name if part is None else encode_counter_key(name, part)
        if key in delta:
            return delta[key]
    return None


def _mean_from_histogram(delta: Counters, candidates: tuple[str, ...]) -> float | None:
    """Exact mean over the step, or None when no request was observed."""
    total = _first_delta(delta, candidates, HISTOGRAM_SUM_PART)
    count = _first_delta(delta, candidates, HISTOGRAM_COUNT_PART)
    if total is None or not count:
        return None
    return total / count


def _growth(start: Counters, end: Counters) -> dict[str | tuple[str, int], float]:
    """What each series grew by; one that shrank (its engine was restarted) is left out."""
    grown = {key: value - start.get(key, 0.0) for key, value in end.items()}
    return {key: value for key, value in grown.items() if value >= 0}


def compute_engine_step_metrics(start: Counters, end: Counters) -> dict[str, float]:
    """Tokens, mean lengths, preemptions and outcomes of one step.

    Prompt tokens include those of aborted requests, mean lengths do not (vllm#55634). A series that
    is absent or was reset in between is omitted: a gap says more than an invented zero.

    Args:
        start: Aggregated counters before the step.
        end: Aggregated counters after it.
    """
    delta = _growth(start, end)
    delivered, failed = _outcomes(delta)
    values = {
        "vllm/prompt_tokens": _first_delta(delta, _PROMPT_TOKENS),
        "vllm/generation_tokens": _first_delta(delta, _GENERATION_TOKENS),
        "vllm/prompt_length_mean": _mean_from_histogram(delta, _PROMPT_LENGTHS),
        "vllm/generation_length_mean": _mean_from_histogram(delta, _GENERATION_LENGTHS),
        "vllm/preemptions": _first_delta(delta, _PREEMPTIONS),
        "vllm/generations_ok": delivered,
        "vllm/generations_failed": failed,
    }
    return {name: value for name, value in values.items() if value is not None}


def _outcomes(delta: Counters) -> tuple[float | None, float | None]:
    for name in _REQUEST_SUCCESS:
        prefix = encode_counter_key(name, f"{_REASON_LABEL}=")
        by_reason = {
            key.removeprefix(prefix): value
            for key, value in delta.items()
            if isinstance(key, str) and key.startswith(prefix)
        }
        if by_reason:
            delivered = sum(v for reason, v in by_reason.items() if reason in _DELIVERED_REASONS)
            return delivered, sum(by_reason.values()) - delivered
    return None, None


def compute_spec_decode_metrics(start: Counters, end: Counters) -> dict[str, float]:
    """Speculative decoding of one step: drafts, accepted tokens, and rates per position.

    When any of the three totals shrank (an engine was restarted), all of them count as zero for
    this step: a ratio of parts from different lifetimes would look plausible and be wrong.

    Args:
        start: Aggregated counters before the step.
        end: Aggregated counters after it.

    Returns:
        ``vllm/spec_*`` values; acceptance length is ``1 + accepted / drafts`` (1.0 without drafts),
        acceptance rate ``accepted / draft tokens`` (0.0 without).
    """
    names = [f"{_SPEC_DECODE_PREFIX}num_{what}" for what in ("drafts", "draft_tokens")]
    names.append(f"{_SPEC_DECODE_PREFIX}num_accepted_tokens")
    totals = [end.get(name, 0.0) - start.get(name, 0.0) for name in names]
    whole = min(totals) >= 0
    drafts, draft_tokens, accepted = totals if whole else (0.0, 0.0, 0.0)
    metrics = {
        "vllm/spec_num_drafts": drafts,
        "vllm/spec_num_draft_tokens": draft_tokens,
        "vllm/spec_num_accepted_tokens": accepted,
        "vllm/spec_acceptance_length": 1.0 + (accepted / drafts if drafts else 0.0),
        "vllm/spec_acceptance_rate": accepted / draft_tokens if draft_tokens else 0.0,
    }
    for key, value in _growth(start, end).items():
        if isinstance(key, tuple) and whole:
            name, position = key
            metrics[f"vllm/{name}-{position}"] = value
            if drafts:
                metrics[f"vllm/spec_acceptance_rate-pos-{position}"] = value / drafts
    return metrics
