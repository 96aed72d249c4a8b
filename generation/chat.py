"""Token ids and log-probabilities on OpenAI chat responses, exactly as the engine produced them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from generation.errors import EngineOutputError

VLLM_LOGPROB_FLOOR = -9999.0
"""Log-probabilities below this (minus infinity included) are reported as this."""

_DYNAMIC_MESSAGE_FIELDS = (
    "routed_experts",
    "prompt_token_ids",
    "generation_token_ids",
    "generation_log_probs",
)


def attach_token_information_to_chat_response_choices(
    response: Any,  # noqa: ANN401 - vLLM's chat response
    final_request_output: Any,  # noqa: ANN401 - vLLM's request output
) -> Any:  # noqa: ANN401
    """Sets prompt ids, generated ids and their log-probabilities on every choice's message.

    No choice is touched unless all of them can be served.

    Raises:
        EngineOutputError: No prompt ids; duplicate indices; choices and outputs that do not match
            one to one; an output without token ids or log-probabilities, with a different number of
            them, or whose log-probabilities lack the sampled token.
    """
    prompt_ids = getattr(final_request_output, "prompt_token_ids", None)
    if prompt_ids is None:
        raise EngineOutputError(
            "the request output has no prompt_token_ids, so the choices cannot be trained on; "
            "return the final RequestOutput of the engine"
        )
    outputs = list(getattr(final_request_output, "outputs", []))
    choices = list(getattr(response, "choices", []))
    output_indices = [output.index for output in outputs]
    choice_indices = [choice.index for choice in choices]
    for what, indices in (("generation output", output_indices), ("choice", choice_indices)):
        if len(set(indices)) != len(indices):
            raise EngineOutputError(f"duplicate {what} indices {sorted(indices)}")
    if set(output_indices) != set(choice_indices):
        raise EngineOutputError(
            "chat choices and generation outputs do not match one to one: choices without output "
            f"{sorted(set(choice_indices) - set(output_indices))}, outputs without choice "
            f"{sorted(set(output_indices) - set(choice_indices))}"
        )
    by_index = {output.index: output for output in outputs}
    generated = [_generated(choice.index, by_index[choice.index]) for choice in choices]
    for choice, (token_ids, logprobs) in zip(choices, generated, strict=True):
        choice.message.prompt_token_ids = list(prompt_ids)
        choice.message.generation_token_ids = token_ids
        choice.message.generation_log_probs = logprobs
    return response


def _generated(index: int, output: object) -> tuple[list[int], list[float]]:
    raw_ids: Sequence[int] | None = getattr(output, "token_ids", None)
    if raw_ids is None:
        raise EngineOutputError(f"generation output {index} has no token_ids")
    token_ids = list(raw_ids)
    details = getattr(output, "logprobs", None)
    if details is None:
        if token_ids:
            raise EngineOutputError(
                f"generation output {index} has {len(token_ids)} tokens and no logprobs; request "
                "logprobs=0 or more"
            )
        return [], []
    if len(details) != len(token_ids):
        raise EngineOutputError(
            f"generation output {index} has {len(token_ids)} tokens and {len(details)} logprobs"
        )
    return token_ids, [
        _sampled_logprob(index, token, at) for token, at in zip(token_ids, details, strict=True)
    ]


def _sampled_logprob(index: int, token_id: int, position: Any) -> float:  # noqa: ANN401
    """Looks up the sampled token: vLLM may list others at the same position, and first."""
    sampled = position.get(token_id)
    if sampled is None:
        raise EngineOutputError(
            f"the logprobs of generation output {index} lack its sampled token {token_id}"
        )
    logprob = float(sampled.logprob)
    if math.isnan(logprob):
        raise EngineOutputError(
            f"the logprob of token {token_id} in generation output {index} is NaN; the engine's "
            "weights or cache are damaged, refit it before using its output"
        )
    return max(logprob, VLLM_LOGPROB_FLOOR)


def model_dump_chat_response_with_dynamic_message_fields(
    response: Any,  # noqa: ANN401 - a pydantic model
) -> dict[str, Any]:
    """Dumps a chat response with the message fields that were attached after it was built."""
    dumped: dict[str, Any] = response.model_dump()
    choices = getattr(response, "choices", [])
    for choice, choice_dict in zip(choices, dumped.get("choices", []), strict=True):
        for field in _DYNAMIC_MESSAGE_FIELDS:
            value = getattr(choice.message, field, None)
            if value is not None:
                choice_dict.setdefault("message", {})[field] = value
    return dumped
