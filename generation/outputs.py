"""Engine outputs as batch columns, exactly as the trainer expects them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from generation.batch import Batch
from generation.capture import VersionSpan
from generation.chat import _generated
from generation.errors import EngineOutputError
from generation.routed_experts import routes_of_completion

TENSOR_COLUMNS = ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs")


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished request, as plain data that travels between processes.

    Attributes:
        prompt_token_ids: What the engine processed.
        token_ids: What it sampled.
        logprobs: Log-probability of each sampled token.
        text: Detokenized response, empty without a tokenizer.
        finish_reason: vLLM's reason; None for a response that was given no room.
        spans: Weight version of the tokens.
        routes: Expert routes, int16 ``[prompt + generated tokens, layers, topk]`` with a dummy for
            the last token; None when they were not asked for, or nothing was generated.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    text: str
    finish_reason: str | None
    spans: list[VersionSpan]
    routes: torch.Tensor | None = None


def completion_of(
    request_output: Any,  # noqa: ANN401 - vLLM's class
    version: int,
    *,
    routed: bool = False,
) -> Completion:
    """Reads the only output of a finished vLLM request.

    Args:
        request_output: vLLM's final ``RequestOutput``.
        version: Weight version of an engine that does not report spans itself.
        routed: Whether the engine was asked for expert routes.

    Raises:
        EngineOutputError: Anything missing, or numbers that do not fit each other.
        InvalidRolloutError: Routes that cannot be those of the sequence.
    """
    output = request_output.outputs[0]
    token_ids, logprobs = _generated(output.index, output)
    prompt = request_output.prompt_token_ids
    if prompt is None:
        raise EngineOutputError(
            f"request {request_output.request_id} came back without prompt_token_ids"
        )
    return Completion(
        prompt_token_ids=list(prompt),
        token_ids=token_ids,
        logprobs=logprobs,
        text=output.text,
        finish_reason=output.finish_reason,
        spans=version_spans(output, len(token_ids), version),
        routes=routes_of_completion(
            request_output, output, f"request {request_output.request_id}", device="cpu"
        )
        if routed
        else None,
    )


def version_spans(
    output: Any,  # noqa: ANN401 - vLLM's class
    tokens: int,
    version: int,
) -> list[VersionSpan]:
    """The engine's own spans with versions as integers; one span when it reports none.

    Raises:
        EngineOutputError: A version that is no integer: someone else labels the engine's weights.
    """
    spans = getattr(output, "weight_versions", None)
    if not spans:
        return [VersionSpan(0, tokens, version)] if tokens else []
    try:
        return [VersionSpan(span.start, span.end, int(span.version)) for span in spans]
    except ValueError as error:
        raise EngineOutputError(
            f"the engine reports weight versions {[s.version for s in spans]}, which this facade "
            "did not set; do not call update_weight_version() on its engines"
        ) from error


def no_room(prompt_token_ids: Sequence[int]) -> Completion:
    """The empty response of a prompt that already fills the model length."""
    return Completion(list(prompt_token_ids), [], [], "", None, [])


def combine(
    completions: Sequence[Completion],
    padded_width: int,
    pad_token_id: int,
    *,
    routed: bool = False,
) -> Batch:
    """Builds the result batch of one shard.

    Generated tokens follow the unpadded prompt directly.

    Args:
        completions: One per sample.
        padded_width: Width of the request's ``input_ids``.
        pad_token_id: Fills the rest of each row.
        routed: Whether the engine was asked for expert routes.

    Returns:
        ``output_ids`` int64 and ``logprobs`` float32 ``[samples, padded_width + longest response]``
        (log-probabilities are 0 over prompt and padding), ``generation_lengths`` and
        ``unpadded_sequence_lengths`` int64 ``[samples]``, ``truncated`` bool ``[samples]`` and the
        list ``weight_version_spans``; with ``routed`` also the list ``routed_experts`` of
        :attr:`Completion.routes`.
    """
    count = len(completions)
    width = padded_width + max((len(c.token_ids) for c in completions), default=0)
    output_ids = torch.full((count, width), pad_token_id, dtype=torch.int64)
    logprobs = torch.zeros((count, width), dtype=torch.float32)
    for row, done in enumerate(completions):
        prompt, end = len(done.prompt_token_ids), len(done.prompt_token_ids) + len(done.token_ids)
        output_ids[row, :end] = torch.tensor(done.prompt_token_ids + done.token_ids)
        logprobs[row, prompt:end] = torch.tensor(done.logprobs)
    generated = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.int64)
    prompts = torch.tensor([len(c.prompt_token_ids) for c in completions], dtype=torch.int64)
    columns = {"routed_experts": [c.routes for c in completions]} if routed else {}
    return Batch(
        {
            "output_ids": output_ids,
            "logprobs": logprobs,
            "generation_lengths": generated,
            "unpadded_sequence_lengths": prompts + generated,
            "truncated": torch.tensor(
                [c.finish_reason in ("length", None) for c in completions], dtype=torch.bool
            ),
            "weight_version_spans": [c.spans for c in completions],
            **columns,
        }
    )


def combine_texts(completions: Sequence[Completion]) -> Batch:
    """Builds the result batch of a text request: ``texts`` and ``weight_version_spans``."""
    return Batch(
        {
            "texts": [c.text for c in completions],
            "weight_version_spans": [c.spans for c in completions],
        }
    )


def check_result(batch: Mapping[str, Any]) -> None:
    """Raises EngineOutputError naming every column a trainer needs that is missing."""
    missing = [name for name in TENSOR_COLUMNS if name not in batch]
    if missing:
        raise EngineOutputError(
            f"the engines returned no {', '.join(missing)}; worker and facade are of different "
            "versions"
        )
