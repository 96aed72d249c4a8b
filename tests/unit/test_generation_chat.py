"""Token ids and log-probabilities attached to chat responses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pydantic
import pytest

from generation.chat import (
    VLLM_LOGPROB_FLOOR,
    attach_token_information_to_chat_response_choices,
    model_dump_chat_response_with_dynamic_message_fields,
)
from generation.errors import EngineOutputError


class Message(pydantic.BaseModel):
    """A message that takes further fields, as vLLM's does."""

    model_config = pydantic.ConfigDict(extra="allow")
    content: str = ""


class Choice(pydantic.BaseModel):
    """One choice."""

    index: int
    message: Message


class Response(pydantic.BaseModel):
    """A chat response."""

    choices: list[Choice]


def answer(*indices: int) -> Response:
    """Returns a response with these choices."""
    return Response(choices=[Choice(index=i, message=Message()) for i in indices])


def logprobs(*values: tuple[int, float]) -> list[dict[int, SimpleNamespace]]:
    """Returns one position per (token, logprob), each with a likelier other token listed first."""
    return [
        {99: SimpleNamespace(logprob=-0.1), token: SimpleNamespace(logprob=value)}
        for token, value in values
    ]


def output(index: int, token_ids: Any, details: Any) -> SimpleNamespace:
    """Returns one completion."""
    return SimpleNamespace(index=index, token_ids=token_ids, logprobs=details)


def attach(response: Response, *outputs: SimpleNamespace, prompt: Any = (1, 2)) -> Response:
    """Attaches the outputs of one request."""
    final = SimpleNamespace(prompt_token_ids=prompt, outputs=list(outputs))
    attached: Response = attach_token_information_to_chat_response_choices(response, final)
    return attached


def test_sampled_tokens_and_their_logprobs_are_attached_by_index() -> None:
    response = attach(
        answer(1, 0),
        output(0, [3], logprobs((3, -1.0))),
        output(1, (4, 5), logprobs((4, -2.0), (5, -3.0))),
    )
    message: Any = response.choices[0].message
    assert message.prompt_token_ids == [1, 2]
    assert message.generation_token_ids == [4, 5]
    assert message.generation_log_probs == [-2.0, -3.0]


def test_minus_infinity_is_floored() -> None:
    message: Any = attach(answer(0), output(0, [3], logprobs((3, -math.inf)))).choices[0].message
    assert message.generation_log_probs == [VLLM_LOGPROB_FLOOR]


def test_empty_generation_needs_no_logprobs() -> None:
    message: Any = attach(answer(0), output(0, [], None)).choices[0].message
    assert (message.generation_token_ids, message.generation_log_probs) == ([], [])


@pytest.mark.parametrize(
    ("outputs", "choices", "message"),
    [
        ([output(0, [], None), output(0, [], None)], [0], "duplicate generation output indices"),
        ([output(0, [], None)], [0, 0], "duplicate choice indices"),
        ([output(0, [], None)], [0, 1], r"choices without output \[1\]"),
        ([output(0, [], None), output(2, [], None)], [0], r"outputs without choice \[2\]"),
        ([output(0, None, None)], [0], "output 0 has no token_ids"),
        ([output(0, [3], None)], [0], "has 1 tokens and no logprobs"),
        ([output(0, [3, 4], logprobs((3, -1.0)))], [0], "has 2 tokens and 1 logprobs"),
        ([output(0, [7], logprobs((3, -1.0)))], [0], "lack its sampled token 7"),
        ([output(0, [3], logprobs((3, math.nan)))], [0], "is NaN"),
    ],
)
def test_incomplete_engine_output_is_refused(
    outputs: list[SimpleNamespace], choices: list[int], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        attach(answer(*choices), *outputs)


def test_missing_prompt_ids_are_refused() -> None:
    with pytest.raises(EngineOutputError, match="no prompt_token_ids"):
        attach(answer(0), output(0, [], None), prompt=None)


def test_no_choice_is_touched_when_one_is_refused() -> None:
    response = answer(0, 1)
    with pytest.raises(EngineOutputError, match="no token_ids"):
        attach(response, output(0, [3], logprobs((3, -1.0))), output(1, None, None))
    assert not hasattr(response.choices[0].message, "generation_token_ids")


def test_dump_keeps_the_attached_fields() -> None:
    response = attach(answer(0), output(0, [3], logprobs((3, -1.0))))
    message = model_dump_chat_response_with_dynamic_message_fields(response)["choices"][0][
        "message"
    ]
    assert message["generation_token_ids"] == [3]
    assert message["generation_log_probs"] == [-1.0]


def test_dump_adds_fields_that_the_model_itself_drops() -> None:
    message = SimpleNamespace(prompt_token_ids=[1], routed_experts=None)
    response = SimpleNamespace(
        choices=[SimpleNamespace(message=message)], model_dump=lambda: {"choices": [{}]}
    )
    dumped = model_dump_chat_response_with_dynamic_message_fields(response)
    assert dumped == {"choices": [{"message": {"prompt_token_ids": [1]}}]}
