"""Prompts as vLLM takes them, and the proof that the engine saw the learner's prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from generation.errors import InvalidRolloutError

_CONTENT_COLUMN = "vllm_content"
_MEDIA_COLUMNS = {"image": "vllm_images", "audio": "vllm_audios", "video": "vllm_videos"}


def format_prompt_for_vllm_generation(
    data: Mapping[str, Any], sample_idx: int | None = None
) -> list[dict[str, Any]] | dict[str, Any]:
    """Builds vLLM prompt dicts from a right-padded batch.

    A sample without media becomes ``{"prompt_token_ids": [...]}`` with its padding stripped. A
    sample with media carries ``multi_modal_data`` (a single item is unwrapped from its list) and
    its ``vllm_content`` text as ``prompt``, or its token ids when that text is absent.

    Args:
        data: ``input_ids`` ``[samples, width]`` and ``input_lengths`` ``[samples]``; optionally the
            per-sample lists ``vllm_content``, ``vllm_images``, ``vllm_audios``, ``vllm_videos``.
        sample_idx: Build only this sample.

    Returns:
        One prompt per sample, or the single prompt when ``sample_idx`` is given.

    Raises:
        InvalidRolloutError: A sample index or an input length that is out of range.
    """
    samples = int(data["input_ids"].shape[0])
    if sample_idx is not None:
        if not 0 <= sample_idx < samples:
            raise InvalidRolloutError(f"sample {sample_idx} is not in a batch of {samples}")
        return _prompt(data, sample_idx)
    return [_prompt(data, index) for index in range(samples)]


def _prompt(data: Mapping[str, Any], index: int) -> dict[str, Any]:
    media = _media(data, index)
    if not media:
        return _token_prompt(data, index)
    contents = data.get(_CONTENT_COLUMN)
    content = contents[index] if contents is not None else None
    # Later turns of a conversation clear the text so that a stale one is not replayed; the token
    # ids are then the truth.
    prompt = _token_prompt(data, index) if content is None else {"prompt": content}
    return {**prompt, "multi_modal_data": media}


def _token_prompt(data: Mapping[str, Any], index: int) -> dict[str, Any]:
    row: torch.Tensor = data["input_ids"][index]
    length = int(data["input_lengths"][index])
    if not 0 <= length <= row.shape[0]:
        raise InvalidRolloutError(
            f"input_lengths[{index}] is {length}, outside 0..{row.shape[0]}, the width of input_ids"
        )
    return {"prompt_token_ids": row[:length].tolist()}


def _media(data: Mapping[str, Any], index: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for modality, column in _MEDIA_COLUMNS.items():
        rows = data.get(column)
        items = rows[index] if rows is not None else None
        if items is not None and len(items) > 0:
            found[modality] = items[0] if len(items) == 1 else items
    return found


def validate_rollout_prompt(expected: Sequence[int], actual: Sequence[int] | None) -> None:
    """Refuses a rollout whose engine prompt is not, token for token, the learner's.

    Raises:
        InvalidRolloutError: The prompts differ or the engine returned none; the message gives both
            lengths and the first position that differs.
    """
    if actual is None:
        raise InvalidRolloutError(
            f"the engine returned no prompt token ids (the learner's prompt has {len(expected)}); "
            "training on an unknown prompt is refused, ask the engine to return them"
        )
    if list(expected) == list(actual):
        return
    shorter = min(len(expected), len(actual))
    first = next((i for i in range(shorter) if expected[i] != actual[i]), shorter)
    raise InvalidRolloutError(
        f"the prompt the engine processed differs from the learner's: {len(actual)} tokens against "
        f"{len(expected)}, first difference at index {first}; send token ids instead of text, or "
        "disable what re-tokenizes or re-expands the prompt"
    )
