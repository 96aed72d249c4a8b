"""Placeholder ranges moved from the rendered prompt to the exact one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from generation.errors import InvalidRolloutError
from generation.placeholders import (
    PrefixSplice,
    _placeholder_range_bounds,
    remap_multimodal_placeholders,
)

IMAGE, AUDIO = 90, 91


@dataclasses.dataclass(frozen=True)
class Range:
    """Like an engine's range: two bounds and something that must survive."""

    offset: int
    length: int
    mask: str | None = None


def remap(
    template: list[int], final: list[int], ranges: Any, splice: PrefixSplice | None = None
) -> Any:
    """Calls the function under test."""
    return remap_multimodal_placeholders(
        template_token_ids=template,
        final_token_ids=final,
        mm_placeholders=ranges,
        splice=splice,
    )


def test_ranges_are_found_in_prompt_order_over_modalities() -> None:
    template = [1, IMAGE, IMAGE, 2, AUDIO, 3, IMAGE, IMAGE]
    final = [7, 7, IMAGE, IMAGE, 7, AUDIO, IMAGE, IMAGE]
    ranges = {"audio": [Range(4, 1)], "image": [Range(6, 2), Range(1, 2)]}
    assert remap(template, final, ranges) == {
        "audio": [Range(5, 1)],
        "image": [Range(6, 2), Range(2, 2)],
    }


def test_coincident_ranges_share_one_span() -> None:
    template, final = [1, AUDIO, AUDIO], [5, 5, AUDIO, AUDIO]
    moved = remap(template, final, {"video": [Range(1, 2)], "audio": [Range(1, 2)]})
    assert moved == {"video": [Range(2, 2)], "audio": [Range(2, 2)]}


def test_equal_media_use_one_span_each() -> None:
    template, final = [IMAGE, 1, IMAGE], [2, IMAGE, IMAGE]
    moved = remap(template, final, {"image": [Range(0, 1), Range(2, 1)]})
    assert [item.offset for item in moved["image"]] == [1, 2]


def test_tail_ranges_shift_by_arithmetic_with_a_splice() -> None:
    # The exact history holds image tokens of its own, which a search would have found first.
    template, final = [1, 2, 3, IMAGE], [IMAGE, 8, 8, 8, 3, IMAGE]
    splice = PrefixSplice(template_cut_start=2, model_cut_end=4)
    assert remap(template, final, {"image": [Range(3, 1)]}, splice)["image"] == [Range(5, 1)]


def test_history_ranges_are_searched_in_the_exact_history_only() -> None:
    template, final = [1, IMAGE, 3, IMAGE], [8, 8, 3, IMAGE]
    splice = PrefixSplice(template_cut_start=2, model_cut_end=2)
    with pytest.raises(InvalidRolloutError, match="does not occur in the exact history"):
        remap(template, final, {"image": [Range(1, 1)]}, splice)


def test_history_ranges_move_with_a_splice() -> None:
    template, final = [1, IMAGE, 3], [8, 8, IMAGE, 3]
    splice = PrefixSplice(template_cut_start=2, model_cut_end=3)
    assert remap(template, final, {"image": [Range(1, 1)]}, splice)["image"] == [Range(2, 1)]


def test_range_across_the_cut_is_refused() -> None:
    template = [1, IMAGE, IMAGE, 3]
    splice = PrefixSplice(template_cut_start=2, model_cut_end=2)
    with pytest.raises(InvalidRolloutError, match="straddles the cut at 2"):
        remap(template, [1, IMAGE, IMAGE, 3], {"image": [Range(1, 2)]}, splice)


@pytest.mark.parametrize("splice", [PrefixSplice(1, 1), PrefixSplice(9, 0), PrefixSplice(0, -1)])
def test_splice_that_does_not_describe_the_prompts_is_refused(splice: PrefixSplice) -> None:
    with pytest.raises(InvalidRolloutError, match="does not describe these prompts"):
        remap([1, 2], [1, 3], {}, splice)


@pytest.mark.parametrize("bounds", [(-1, 1), (0, 0), (2, 2), (5, 1)])
def test_range_outside_the_rendered_prompt_is_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="outside the rendered prompt of 3 tokens"):
        remap([1, 2, 3], [1, 2, 3], {"image": [Range(*bounds)]})


def test_range_that_is_not_found_is_refused() -> None:
    with pytest.raises(ValueError, match="placeholder at 1 of length 1 does not occur"):
        remap([1, IMAGE], [1, 2], {"image": [Range(1, 1)]})


def test_overlapping_ranges_are_refused() -> None:
    with pytest.raises(InvalidRolloutError, match="overlaps the one before"):
        remap([IMAGE] * 4, [IMAGE] * 4, {"image": [Range(0, 2), Range(1, 2)]})


def test_bytes_of_two_tokens_are_not_mistaken_for_one() -> None:
    # 1 << 8 looks like token 1 one byte further on.
    with pytest.raises(InvalidRolloutError, match="does not occur"):
        remap([1], [1 << 8, 0], {"image": [Range(0, 1)]})


def test_inputs_stay_as_they_are() -> None:
    item = {"offset": 0, "length": 1, "extra": "kept"}
    ranges = {"image": [item]}
    moved = remap([IMAGE], [5, IMAGE], ranges)
    assert moved == {"image": [{"offset": 1, "length": 1, "extra": "kept"}]}
    assert ranges == {"image": [{"offset": 0, "length": 1, "extra": "kept"}]}


def test_other_fields_of_a_range_survive() -> None:
    assert remap([IMAGE], [5, IMAGE], {"image": [Range(0, 1, mask="m")]})["image"][0].mask == "m"


def test_placeholders_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(TypeError, match="mapping of modalities, got list"):
        remap([1], [1], [Range(0, 1)])


@pytest.mark.parametrize("placeholder", [{"offset": 2, "length": 3}, Range(2, 3)])
def test_bounds_come_from_mappings_and_dataclasses(placeholder: object) -> None:
    assert _placeholder_range_bounds(placeholder) == (2, 3)


@pytest.mark.parametrize(
    "placeholder", [(2, 3), None, Range, {"offset": 2}, {"offset": True, "length": 1}]
)
def test_bounds_of_anything_else_are_refused(placeholder: object) -> None:
    with pytest.raises(TypeError, match="placeholder"):
        _placeholder_range_bounds(placeholder)
