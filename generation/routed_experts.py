"""Expert routes of generated tokens, aligned to the sequence, for router replay in the trainer."""

from __future__ import annotations

import logging
from typing import Any, Literal, TypedDict, overload

import torch

from generation.errors import EngineOutputError, InvalidRolloutError
from generation.routed_codec import encode_routed_experts

logger = logging.getLogger(__name__)

R3_MISSING_ROUTE_SENTINEL = -1
"""Fills the route of a token whose route is unknown: the trainer then uses its own router. No
expert has this id, and it fits every signed dtype that carries routes."""

G_ROUTED_EXPERTS_RANGE_CHECKED = False
"""Whether this process has compared expert ids with the carry dtype. The number of experts is a
constant of the model, so the first non-empty tensor decides and later ones skip the reduction."""

DEFAULT_ROUTES_DTYPE = torch.int16


class RouteStats(TypedDict):
    """Counts of token routes: returned, needed, lacking, and beyond the one allowed extra."""

    actual: int
    expected: int
    missing: int
    surplus: int


def reset_routed_experts_range_check() -> None:
    """Makes the next tensor be checked again, e.g. after another model was loaded."""
    global G_ROUTED_EXPERTS_RANGE_CHECKED
    G_ROUTED_EXPERTS_RANGE_CHECKED = False


def _as_routed_experts_tensor(
    value: Any,  # noqa: ANN401 - whatever torch.as_tensor takes
    *,
    device: torch.device | str,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Converts expert ids to ``dtype``, refusing once per process ids that would wrap.

    Raises:
        InvalidRolloutError: An id outside what ``dtype`` holds.
    """
    global G_ROUTED_EXPERTS_RANGE_CHECKED
    tensor = torch.as_tensor(value, device=device)
    if not G_ROUTED_EXPERTS_RANGE_CHECKED and tensor.numel() > 0:
        wide = tensor.to(torch.int64)
        lowest, highest = int(wide.min()), int(wide.max())
        limits = torch.iinfo(dtype)
        if lowest < R3_MISSING_ROUTE_SENTINEL or highest > limits.max:
            raise InvalidRolloutError(
                f"expert ids {lowest}..{highest} do not fit 0..{limits.max} of {dtype}; carry "
                "routes in a wider dtype (routed_experts_dtype)"
            )
        G_ROUTED_EXPERTS_RANGE_CHECKED = True
    return tensor.to(dtype=dtype)


@overload
def pad_and_align_routed_expert_indices(
    request_output: object,
    completion_output: object,
    *,
    valid_length: int,
    padded_length: int,
    device: torch.device | str,
    require_complete_routed_experts: bool = ...,
    allow_missing_routed_experts_fallback: bool = ...,
    return_stats: Literal[False] = ...,
    routed_experts_dtype: torch.dtype = ...,
) -> torch.Tensor | None: ...


@overload
def pad_and_align_routed_expert_indices(
    request_output: object,
    completion_output: object,
    *,
    valid_length: int,
    padded_length: int,
    device: torch.device | str,
    require_complete_routed_experts: bool = ...,
    allow_missing_routed_experts_fallback: bool = ...,
    return_stats: Literal[True],
    routed_experts_dtype: torch.dtype = ...,
) -> tuple[torch.Tensor | None, RouteStats]: ...


def pad_and_align_routed_expert_indices(
    request_output: object,
    completion_output: object,
    *,
    valid_length: int,
    padded_length: int,
    device: torch.device | str,
    require_complete_routed_experts: bool = False,
    allow_missing_routed_experts_fallback: bool = True,
    return_stats: bool = False,
    routed_experts_dtype: torch.dtype = DEFAULT_ROUTES_DTYPE,
) -> torch.Tensor | tuple[torch.Tensor | None, RouteStats] | None:
    """Aligns the routes of one completion with its padded sequence.

    Every token but the last was fed to the model, so ``min(max(valid_length - 1, 0),
    padded_length)`` routes are expected. Positions whose route is missing hold
    :data:`R3_MISSING_ROUTE_SENTINEL`; positions after the expected ones hold the valid dummy route
    ``0..topk-1``.

    Args:
        request_output: Read for ``prompt_routed_experts`` ``[prompt tokens, layers, topk]``.
        completion_output: Read for ``routed_experts`` ``[decoded tokens, layers, topk]``.
        valid_length: Prompt plus generated tokens.
        padded_length: Rows of the result.
        device: Where the result lives.
        require_complete_routed_experts: Strict: refuse surplus routes (one, the last token's, is
            allowed and ignored) and, without the fallback, missing ones.
        allow_missing_routed_experts_fallback: Let strict mode fill missing routes too.
        return_stats: Return the counts as well.
        routed_experts_dtype: Signed integer dtype of the result.

    Returns:
        ``[padded_length, layers, topk]``, or None when the engine returned no routes; with
        ``return_stats`` a pair of that and :class:`RouteStats`.

    Raises:
        InvalidRolloutError: Routes that are not 3-D, or what strict mode refuses.
    """
    parts = [
        _as_routed_experts_tensor(value, device=device, dtype=routed_experts_dtype)
        for value in (
            getattr(request_output, "prompt_routed_experts", None),
            getattr(completion_output, "routed_experts", None),
        )
        if value is not None
    ]
    expected = min(max(valid_length - 1, 0), padded_length)
    if not parts:
        stats = RouteStats(actual=0, expected=expected, missing=0, surplus=0)
        return (None, stats) if return_stats else None
    for part in parts:
        if part.dim() != 3:
            raise InvalidRolloutError(
                f"routes must be [tokens, layers, topk], the engine returned {tuple(part.shape)}"
            )
    routes = torch.cat(parts)
    actual = int(routes.shape[0])
    stats = RouteStats(
        actual=actual,
        expected=expected,
        missing=max(expected - actual, 0),
        surplus=max(actual - expected - 1, 0),
    )
    if require_complete_routed_experts:
        _refuse(stats, request_output, allow_missing=allow_missing_routed_experts_fallback)
    dummy = torch.arange(routes.shape[2], dtype=routed_experts_dtype, device=device)
    aligned = dummy.repeat(padded_length, routes.shape[1], 1)
    kept = min(expected, actual)
    aligned[:kept] = routes[:kept]
    aligned[kept:expected] = R3_MISSING_ROUTE_SENTINEL
    return (aligned, stats) if return_stats else aligned


def _refuse(stats: RouteStats, request_output: object, *, allow_missing: bool) -> None:
    cached = getattr(request_output, "num_cached_tokens", None)
    counts = f"{stats['actual']} routes, {stats['expected']} expected, {cached} tokens from cache"
    if stats["missing"] and not allow_missing:
        raise InvalidRolloutError(
            f"the engine returned too few expert routes for replay ({counts}); disable prefix "
            "caching, or allow the trainer's own router for missing routes"
        )
    if stats["surplus"]:
        raise InvalidRolloutError(
            f"the engine returned too many expert routes for replay ({counts}, one more is "
            "allowed); the routes belong to another sequence"
        )


def routes_of_completion(
    request_output: Any,  # noqa: ANN401 - vLLM's request output
    completion_output: Any,  # noqa: ANN401 - vLLM's completion output
    what: str,
    *,
    device: torch.device | str,
    logger: logging.Logger = logger,
    routed_experts_dtype: torch.dtype = DEFAULT_ROUTES_DTYPE,
) -> torch.Tensor:
    """Routes of one completion that must have some; missing ones are filled and warned of.

    Args:
        request_output: As for :func:`pad_and_align_routed_expert_indices`.
        completion_output: The same.
        what: Names the completion in errors and warnings.
        device: Where the result lives.
        logger: Takes the warning.
        routed_experts_dtype: Signed integer dtype of the result.

    Returns:
        ``[prompt + generated tokens, layers, topk]``; the last token's row is a dummy.

    Raises:
        EngineOutputError: The engine returned no routes.
        InvalidRolloutError: More routes than the sequence can have.
    """
    length = len(getattr(request_output, "prompt_token_ids", None) or [])
    length += len(getattr(completion_output, "token_ids", None) or [])
    routes, stats = pad_and_align_routed_expert_indices(
        request_output,
        completion_output,
        valid_length=length,
        padded_length=length,
        device=device,
        require_complete_routed_experts=True,
        return_stats=True,
        routed_experts_dtype=routed_experts_dtype,
    )
    if routes is None:
        raise EngineOutputError(
            f"{what} has no expert routes; start the engine with enable_return_routed_experts=True"
        )
    if stats["missing"]:
        logger.warning(
            "%s lacks %d of %d expert routes; the trainer's own router decides for those tokens",
            what,
            stats["missing"],
            stats["expected"],
        )
    return routes


def attach_routed_experts_to_chat_response_choices(
    response: Any,  # noqa: ANN401 - vLLM's chat response
    final_request_output: Any,  # noqa: ANN401 - vLLM's request output
    *,
    device: torch.device | str,
    logger: logging.Logger = logger,
    routed_experts_dtype: torch.dtype = DEFAULT_ROUTES_DTYPE,
) -> Any:  # noqa: ANN401
    """Sets ``message.routed_experts`` of every choice to its encoded routes, matched by index.

    No choice is touched unless all of them can be served. Missing routes are filled and warned of.

    Raises:
        EngineOutputError: A choice without a generation output, or outputs without routes.
        InvalidRolloutError: More routes than the sequence can have.
    """
    outputs = {output.index: output for output in getattr(final_request_output, "outputs", [])}
    choices = list(getattr(response, "choices", []))
    unmatched = sorted(choice.index for choice in choices if choice.index not in outputs)
    if unmatched:
        raise EngineOutputError(
            f"chat choices {unmatched} have no generation output (outputs: {sorted(outputs)}), so "
            "their expert routes are unknown; the engine answered another request"
        )
    encoded = [
        encode_routed_experts(
            routes_of_completion(
                final_request_output,
                outputs[choice.index],
                f"chat choice {choice.index}",
                device=device,
                logger=logger,
                routed_experts_dtype=routed_experts_dtype,
            )
        )
        for choice in choices
    ]
    for choice, text in zip(choices, encoded, strict=True):
        choice.message.routed_experts = text
    return response
