"""Prompts for vLLM, and the check that the engine saw the learner's prompt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from generation.errors import InvalidRolloutError
from generation.prompts import format_prompt_for_vllm_generation, validate_rollout_prompt


def batch(**columns: Any) -> dict[str, Any]:
    """Returns two padded prompts, [1, 2] and []."""
    return {
        "input_ids": torch.tensor([[1, 2, 0], [0, 0, 0]]),
        "input_lengths": torch.tensor([2, 0]),
        **columns,
    }


def test_padding_is_stripped_and_empty_prompts_stay() -> None:
    assert format_prompt_for_vllm_generation(batch()) == [
        {"prompt_token_ids": [1, 2]},
        {"prompt_token_ids": []},
    ]


def test_one_sample_is_not_wrapped_in_a_list() -> None:
    assert format_prompt_for_vllm_generation(batch(), 0) == {"prompt_token_ids": [1, 2]}


@pytest.mark.parametrize("index", [-1, 2])
def test_sample_outside_the_batch_is_refused(index: int) -> None:
    with pytest.raises(InvalidRolloutError, match=f"sample {index} is not in a batch of 2"):
        format_prompt_for_vllm_generation(batch(), index)


@pytest.mark.parametrize("length", [-1, 4])
def test_length_outside_the_row_is_refused(length: int) -> None:
    data = batch(input_lengths=torch.tensor([length, 0]))
    with pytest.raises(InvalidRolloutError, match=rf"input_lengths\[0\] is {length}"):
        format_prompt_for_vllm_generation(data, 0)


def test_content_without_media_takes_the_token_path() -> None:
    data = batch(vllm_content=["text", None], vllm_images=[[], []])
    assert format_prompt_for_vllm_generation(data, 0) == {"prompt_token_ids": [1, 2]}


def test_single_media_item_is_unwrapped() -> None:
    data = batch(vllm_content=["see", None], vllm_images=[["picture"], []])
    assert format_prompt_for_vllm_generation(data, 0) == {
        "prompt": "see",
        "multi_modal_data": {"image": "picture"},
    }


def test_all_media_kinds_travel_together() -> None:
    data = batch(
        vllm_content=["see", None],
        vllm_images=[["a", "b"], []],
        vllm_audios=[["c"], []],
        vllm_videos=[["d", "e"], None],
    )
    prompt = format_prompt_for_vllm_generation(data, 0)
    assert isinstance(prompt, dict)
    assert prompt["multi_modal_data"] == {"image": ["a", "b"], "audio": "c", "video": ["d", "e"]}


def test_media_without_content_go_with_token_ids() -> None:
    data = batch(vllm_content=[None, None], vllm_images=[["picture"], []])
    assert format_prompt_for_vllm_generation(data, 0) == {
        "prompt_token_ids": [1, 2],
        "multi_modal_data": {"image": "picture"},
    }


def test_media_are_not_lost_when_there_is_no_content_column() -> None:
    prompt = format_prompt_for_vllm_generation(batch(vllm_images=[["picture"], []]), 0)
    assert isinstance(prompt, dict)
    assert prompt["multi_modal_data"] == {"image": "picture"}


def test_equal_prompts_pass() -> None:
    validate_rollout_prompt([4, 5], (4, 5))


def test_missing_engine_prompt_is_refused() -> None:
    with pytest.raises(InvalidRolloutError, match="returned no prompt token ids"):
        validate_rollout_prompt([4, 5], None)


@pytest.mark.parametrize(
    ("actual", "first"), [([4], 1), ([4, 5, 6], 2), ([4, 9], 1), ([9, 5], 0), ([], 0)]
)
def test_other_engine_prompt_is_refused_with_the_first_difference(
    actual: list[int], first: int
) -> None:
    with pytest.raises(
        ValueError, match=f"{len(actual)} tokens against 2, first difference at index {first}"
    ):
        validate_rollout_prompt([4, 5], actual)
