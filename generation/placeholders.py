"""Moves multimodal placeholder ranges from a rendered prompt onto the exact token prompt.

Rendering a conversation again may tokenize its history differently from what the engine generated.
The exact tokens replace the rendered ones, so the offsets of image, audio and video placeholders
have to be found again.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from generation.errors import InvalidRolloutError


@dataclasses.dataclass(frozen=True)
class PrefixSplice:
    """Where exact history tokens replaced the rendered history.

    ``final == final[:model_cut_end] + template[template_cut_start:]``.
    """

    template_cut_start: int
    model_cut_end: int


def _placeholder_range_bounds(placeholder: Any) -> tuple[int, int]:  # noqa: ANN401 - checked here
    """Returns ``(offset, length)`` of a mapping or of a dataclass instance.

    Raises:
        TypeError: Anything else, or bounds that are not integers.
    """
    if isinstance(placeholder, Mapping):
        bounds = (placeholder.get("offset"), placeholder.get("length"))
    elif dataclasses.is_dataclass(placeholder) and not isinstance(placeholder, type):
        bounds = (getattr(placeholder, "offset", None), getattr(placeholder, "length", None))
    else:
        raise TypeError(
            "a placeholder range is a mapping or a dataclass with offset and length, got "
            f"{type(placeholder).__name__}"
        )
    offset, length = bounds
    if type(offset) is not int or type(length) is not int:
        raise TypeError(f"placeholder offset and length must be integers, got {bounds}")
    return offset, length


def remap_multimodal_placeholders(
    *,
    template_token_ids: Sequence[int],
    final_token_ids: Sequence[int],
    mm_placeholders: Mapping[str, Sequence[Any]],
    splice: PrefixSplice | None = None,
) -> dict[str, list[Any]]:
    """Returns the same ranges with offsets valid in ``final_token_ids``; inputs stay unmodified.

    With ``splice``, ranges in the kept tail shift by arithmetic and ranges in the replaced history
    are searched for, in prompt order, in the exact history. Without it every range is searched for,
    in prompt order over all modalities. Ranges that coincide (the audio of a video) are one span of
    the prompt: they share one new offset and are looked for once.

    Args:
        template_token_ids: The rendered prompt that the ranges refer to.
        final_token_ids: The prompt that the engine will get.
        mm_placeholders: Modality to its ranges, each a mapping or dataclass with offset and length.
        splice: How the final prompt was put together, when known.

    Returns:
        Modality to ranges, in the order given, of the types given.

    Raises:
        InvalidRolloutError: A range out of bounds, across the cut, overlapping another one without
            coinciding, or not to be found; or a splice that does not describe the two prompts.
        TypeError: ``mm_placeholders`` or a range of the wrong type.
    """
    if not isinstance(mm_placeholders, Mapping):
        raise TypeError(
            f"mm_placeholders is a mapping of modalities, got {type(mm_placeholders).__name__}"
        )
    template, final = list(template_token_ids), list(final_token_ids)
    bounds = {
        modality: [_placeholder_range_bounds(item) for item in items]
        for modality, items in mm_placeholders.items()
    }
    spans = sorted({span for items in bounds.values() for span in items})
    _check_spans(spans, len(template))
    if splice is None:
        moved = _locate(spans, template, final, what="the final prompt")
    else:
        _check_splice(splice, template, final)
        moved = _apply_splice(splice, spans, template, final)
    return {
        modality: [
            _with_offset(item, moved[span])
            for item, span in zip(items, bounds[modality], strict=True)
        ]
        for modality, items in mm_placeholders.items()
    }


def _apply_splice(
    splice: PrefixSplice, spans: list[tuple[int, int]], template: list[int], final: list[int]
) -> dict[tuple[int, int], int]:
    cut = splice.template_cut_start
    for offset, length in spans:
        if offset < cut < offset + length:
            raise InvalidRolloutError(
                f"placeholder at {offset} of length {length} straddles the cut at {cut}; cut the "
                "history between messages, not inside media"
            )
    before = [span for span in spans if span[0] < cut]
    moved = _locate(before, template, final[: splice.model_cut_end], what="the exact history")
    shift = splice.model_cut_end - cut
    return moved | {span: span[0] + shift for span in spans if span[0] >= cut}


def _locate(
    spans: list[tuple[int, int]], template: list[int], final: list[int], *, what: str
) -> dict[tuple[int, int], int]:
    """Finds each span's tokens in ``final``, each one after the end of the one before."""
    haystack = array("q", final).tobytes()
    moved: dict[tuple[int, int], int] = {}
    cursor = 0
    for offset, length in spans:
        found = _find(haystack, array("q", template[offset : offset + length]).tobytes(), cursor)
        if found is None:
            raise InvalidRolloutError(
                f"placeholder at {offset} of length {length} does not occur in {what} after token "
                f"{cursor}; the media of this prompt do not match its tokens"
            )
        moved[offset, length] = found
        cursor = found + length
    return moved


def _find(haystack: bytes, needle: bytes, start: int) -> int | None:
    """Token index of ``needle`` at or after ``start``; byte search keeps long prompts linear."""
    width = array("q").itemsize
    at = haystack.find(needle, start * width)
    while at != -1 and at % width:
        at = haystack.find(needle, at + 1)
    return None if at == -1 else at // width


def _check_spans(spans: list[tuple[int, int]], length_of_prompt: int) -> None:
    end = 0
    for offset, length in spans:
        if offset < 0 or length < 1 or offset + length > length_of_prompt:
            raise InvalidRolloutError(
                f"placeholder at {offset} of length {length} is outside the rendered prompt of "
                f"{length_of_prompt} tokens"
            )
        if offset < end:
            raise InvalidRolloutError(
                f"placeholder at {offset} of length {length} overlaps the one before without "
                "coinciding with it; ranges must be equal or apart"
            )
        end = offset + length


def _check_splice(splice: PrefixSplice, template: list[int], final: list[int]) -> None:
    inside = 0 <= splice.template_cut_start <= len(template)
    inside = inside and 0 <= splice.model_cut_end <= len(final)
    if not inside or template[splice.template_cut_start :] != final[splice.model_cut_end :]:
        raise InvalidRolloutError(
            f"{splice} does not describe these prompts ({len(template)} rendered and {len(final)} "
            "final tokens): what follows the cuts must be equal"
        )


def _with_offset(placeholder: Any, offset: int) -> Any:  # noqa: ANN401 - type in, type out
    if isinstance(placeholder, Mapping):
        return {**placeholder, "offset": offset}
    return dataclasses.replace(placeholder, offset=offset)
