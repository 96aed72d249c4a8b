"""Expert routes: range check, alignment to the sequence, the text codec, chat choices."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generation import routed_experts, utils
from generation.errors import EngineOutputError, InvalidRolloutError
from generation.routed_codec import decode_routed_experts, encode_routed_experts
from generation.routed_experts import (
    R3_MISSING_ROUTE_SENTINEL,
    _as_routed_experts_tensor,
    attach_routed_experts_to_chat_response_choices,
    pad_and_align_routed_expert_indices,
)


@pytest.fixture(autouse=True)
def _unchecked() -> Iterator[None]:
    routed_experts.reset_routed_experts_range_check()
    yield
    routed_experts.reset_routed_experts_range_check()


def routes(tokens: int, first: int = 10) -> torch.Tensor:
    """Returns [tokens, 2 layers, topk 2] with distinct values."""
    return torch.arange(first, first + tokens * 4).reshape(tokens, 2, 2)


def align(prompt: Any, decode: Any, **options: Any) -> Any:
    """Aligns with defaults for the arguments every call needs."""
    options = {"valid_length": 4, "padded_length": 5, "device": "cpu", **options}
    return pad_and_align_routed_expert_indices(
        SimpleNamespace(prompt_routed_experts=prompt, num_cached_tokens=0),
        SimpleNamespace(routed_experts=decode),
        **options,
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_sentinel_fits_every_carry_dtype_and_is_no_expert(dtype: torch.dtype) -> None:
    assert torch.iinfo(dtype).min <= R3_MISSING_ROUTE_SENTINEL < 0


def test_id_that_would_wrap_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expert ids 0\.\.128 do not fit"):
        _as_routed_experts_tensor([[[0, 128]]], device="cpu", dtype=torch.int8)


def test_id_below_the_sentinel_is_refused() -> None:
    with pytest.raises(InvalidRolloutError, match=r"-2\.\.0"):
        _as_routed_experts_tensor([[[-2, 0]]], device="cpu", dtype=torch.int8)


def test_range_is_checked_once_per_process() -> None:
    _as_routed_experts_tensor([[[1]]], device="cpu", dtype=torch.int8)
    wrapped = _as_routed_experts_tensor([[[300]]], device="cpu", dtype=torch.int8)
    assert wrapped.dtype is torch.int8
    assert routed_experts.G_ROUTED_EXPERTS_RANGE_CHECKED


def test_empty_tensor_does_not_count_as_checked() -> None:
    _as_routed_experts_tensor(torch.empty(0, 1, 1), device="cpu", dtype=torch.int8)
    with pytest.raises(ValueError, match="do not fit"):
        _as_routed_experts_tensor([[[300]]], device="cpu", dtype=torch.int8)


def test_utils_reads_the_live_flag() -> None:
    before = utils.G_ROUTED_EXPERTS_RANGE_CHECKED
    _as_routed_experts_tensor([[[1]]], device="cpu", dtype=torch.int8)
    assert (before, utils.G_ROUTED_EXPERTS_RANGE_CHECKED) == (False, True)


def test_prompt_and_decode_routes_fill_all_but_the_last_token() -> None:
    aligned = align(routes(2), routes(1, first=50))
    assert aligned.dtype is torch.int16
    assert torch.equal(aligned[:2].long(), routes(2))
    assert torch.equal(aligned[2:3].long(), routes(1, first=50))


def test_rows_after_the_sequence_hold_a_valid_dummy() -> None:
    aligned = align(routes(3), None)
    assert aligned[3:].tolist() == [[[0, 1], [0, 1]]] * 2


def test_missing_rows_hold_the_sentinel() -> None:
    aligned, stats = align(routes(1), None, return_stats=True)
    assert (aligned[1:3] == R3_MISSING_ROUTE_SENTINEL).all()
    assert stats == {"actual": 1, "expected": 3, "missing": 2, "surplus": 0}


def test_one_route_more_is_ignored() -> None:
    aligned, stats = align(routes(4), None, require_complete_routed_experts=True, return_stats=True)
    assert aligned[3].tolist() == [[0, 1], [0, 1]]
    assert stats == {"actual": 4, "expected": 3, "missing": 0, "surplus": 0}


def test_two_routes_more_are_refused_when_strict() -> None:
    with pytest.raises(ValueError, match="too many expert routes"):
        align(routes(5), None, require_complete_routed_experts=True)


def test_two_routes_more_are_counted_otherwise() -> None:
    _, stats = align(routes(5), None, return_stats=True)
    assert stats["surplus"] == 1


def test_missing_routes_are_refused_when_strict_without_fallback() -> None:
    with pytest.raises(ValueError, match="too few expert routes"):
        align(
            routes(1),
            None,
            require_complete_routed_experts=True,
            allow_missing_routed_experts_fallback=False,
        )


def test_no_routes_give_none_and_the_expected_count() -> None:
    assert align(None, None) is None
    assert align(None, None, return_stats=True)[1]["expected"] == 3


@pytest.mark.parametrize(
    ("valid", "padded", "expected"), [(0, 5, 0), (1, 5, 0), (4, 5, 3), (9, 5, 5)]
)
def test_expected_routes_follow_the_lengths(valid: int, padded: int, expected: int) -> None:
    _, stats = align(routes(1), None, valid_length=valid, padded_length=padded, return_stats=True)
    assert stats["expected"] == expected


def test_routes_that_are_not_3d_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \[tokens, layers, topk\]"):
        align(torch.zeros(2, 2), None)


@given(
    shape=st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 3)),
    dtype=st.sampled_from([torch.int8, torch.int16, torch.int32]),
    seed=st.integers(0, 99),
)
def test_codec_round_trips(shape: tuple[int, int, int], dtype: torch.dtype, seed: int) -> None:
    limits = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-1, limits.max, shape, generator=generator).to(dtype)
    decoded = decode_routed_experts(encode_routed_experts(values))
    assert decoded.dtype is dtype
    assert torch.equal(decoded, values)


def test_codec_is_little_endian_with_a_readable_header() -> None:
    encoded = encode_routed_experts(torch.tensor([[[1, 258]]], dtype=torch.int16))
    assert encoded == "wsre1:int16:1x1x2:AQACAQ=="


@pytest.mark.parametrize(
    "text",
    [
        "",
        "other:int16:1x1x2:AQACAQ==",
        "wsre1:float32:1x1x1:AAAAAA==",
        "wsre1:int16:1x2:AQACAQ==",
        "wsre1:int16:1x1x-2:AQACAQ==",
        "wsre1:int16:1x1x3:AQACAQ==",
        "wsre1:int16:9999999x9999999x9:AQACAQ==",
        "wsre1:int16:1x1x2:AQ*CAQ==",
    ],
)
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidRolloutError, match="route"):
        decode_routed_experts(text)


@pytest.mark.parametrize("values", [torch.zeros(2, 2, dtype=torch.int16), torch.zeros(1, 1, 1)])
def test_other_tensors_are_not_encoded(values: torch.Tensor) -> None:
    with pytest.raises(InvalidRolloutError, match="routes must be"):
        encode_routed_experts(values)


def answer(*indices: int) -> SimpleNamespace:
    """Returns a chat response with these choices."""
    return SimpleNamespace(
        choices=[SimpleNamespace(index=i, message=SimpleNamespace()) for i in indices]
    )


def output(*outputs: tuple[int, Any]) -> SimpleNamespace:
    """Returns a request output with two prompt tokens and (index, routes) completions of two."""
    return SimpleNamespace(
        prompt_token_ids=[1, 2],
        outputs=[SimpleNamespace(index=i, token_ids=[3, 4], routed_experts=r) for i, r in outputs],
    )


def test_choices_get_their_own_routes_by_index() -> None:
    response = attach_routed_experts_to_chat_response_choices(
        answer(1, 0), output((0, routes(3)), (1, routes(3, first=40))), device="cpu"
    )
    first = decode_routed_experts(response.choices[0].message.routed_experts)
    assert first.shape == (4, 2, 2)
    assert torch.equal(first[:3].long(), routes(3, first=40))


def test_choice_without_output_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"choices \[1\] have no generation output"):
        attach_routed_experts_to_chat_response_choices(
            answer(0, 1), output((0, routes(3))), device="cpu"
        )


def test_no_choice_is_touched_when_one_lacks_routes() -> None:
    response = answer(0, 1)
    with pytest.raises(EngineOutputError, match="chat choice 1 has no expert routes"):
        attach_routed_experts_to_chat_response_choices(
            response, output((0, routes(3)), (1, None)), device="cpu"
        )
    assert not hasattr(response.choices[0].message, "routed_experts")


def test_missing_routes_of_a_choice_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        attach_routed_experts_to_chat_response_choices(
            answer(0), output((0, routes(1))), device="cpu"
        )
    assert "chat choice 0 lacks 2 of 3 expert routes" in caplog.text
