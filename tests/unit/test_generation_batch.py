"""Batches: columns of equal length, split over shards and joined with padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from generation.batch import Batch, check_right_padding
from generation.errors import InvalidRolloutError


def numbered(samples: int, width: int = 2) -> Batch:
    """Returns a batch whose first column tells the sample."""
    ids = torch.arange(samples)[:, None].expand(samples, width).clone()
    return Batch({"input_ids": ids, "names": [str(i) for i in range(samples)]})


@given(samples=st.integers(0, 9), count=st.integers(1, 5))
def test_uneven_shards_keep_every_sample_in_order_and_differ_by_one(
    samples: int, count: int
) -> None:
    parts = numbered(samples).shard(count, allow_uneven=True)
    sizes = [part.size for part in parts]
    assert len(parts) == count
    assert max(sizes) - min(sizes) <= 1
    assert [name for part in parts for name in part["names"]] == [str(i) for i in range(samples)]


@given(samples=st.integers(1, 9), count=st.integers(1, 5))
def test_joining_shards_gives_the_batch_back(samples: int, count: int) -> None:
    whole = numbered(samples)
    joined = Batch.concat(whole.shard(count, allow_uneven=True))
    assert torch.equal(joined["input_ids"], whole["input_ids"])
    assert joined["names"] == whole["names"]


def test_uneven_shards_are_refused_unless_allowed() -> None:
    with pytest.raises(InvalidRolloutError, match="5 samples do not divide over 2 parts"):
        numbered(5).shard(2)


def test_zero_shards_are_refused() -> None:
    with pytest.raises(InvalidRolloutError, match="at least 1 part"):
        numbered(1).shard(0)


def test_concat_pads_each_column_with_its_own_value() -> None:
    parts = [
        Batch({"output_ids": torch.ones(1, 3, dtype=torch.long), "logprobs": torch.ones(1, 3)}),
        Batch({"output_ids": torch.ones(1, 1, dtype=torch.long), "logprobs": torch.ones(1, 1)}),
    ]
    joined = Batch.concat(parts, pad={"output_ids": 7})
    assert joined["output_ids"].tolist() == [[1, 1, 1], [1, 7, 7]]
    assert joined["logprobs"].tolist() == [[1, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ([], "at least one batch"),
        ([{"a": [1]}, {"b": [1]}], r"differ in columns: \['a', 'b'\]"),
        ([{"a": torch.ones(1)}, {"a": [1]}], "tensor in some batches"),
        ([{"a": torch.ones(1)}, {"a": torch.ones(1, dtype=torch.int8)}], "differs in dtype"),
        ([{"a": torch.ones(1, 1, 2)}, {"a": torch.ones(1, 1, 3)}], "differs in dtype or shape"),
    ],
)
def test_unlike_batches_are_not_joined(columns: list[dict[str, object]], message: str) -> None:
    with pytest.raises(InvalidRolloutError, match=message):
        Batch.concat([Batch(each) for each in columns])


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(InvalidRolloutError, match="'a': 2, 'b': 1"):
        Batch({"a": torch.ones(2), "b": [1]})


@pytest.mark.parametrize("value", [3, torch.tensor(1), "text"])
def test_column_without_samples_is_refused(value: object) -> None:
    with pytest.raises(InvalidRolloutError, match="column a must be"):
        Batch({"a": value})


def test_missing_columns_are_named() -> None:
    with pytest.raises(InvalidRolloutError, match="lacks prompts, more; it has input_ids, names"):
        numbered(1).require("input_ids", "prompts", "more")


def test_right_padded_prompts_pass_even_when_they_contain_the_pad_token() -> None:
    ids = torch.tensor([[0, 5, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0]])
    check_right_padding(ids, torch.tensor([3, 4, 0]), pad_token_id=0)


def test_left_padded_prompt_is_refused_by_sample() -> None:
    ids = torch.tensor([[1, 2, 0], [0, 1, 2]])
    with pytest.raises(InvalidRolloutError, match=r"samples \[1\] hold tokens"):
        check_right_padding(ids, torch.tensor([2, 2]), pad_token_id=0)


@pytest.mark.parametrize("length", [-1, 4])
def test_length_outside_the_width_is_refused(length: int) -> None:
    with pytest.raises(InvalidRolloutError, match=r"samples \[0\] lie outside 0\.\.3"):
        check_right_padding(torch.zeros(1, 3), torch.tensor([length]), pad_token_id=0)


def test_lengths_of_another_shape_are_refused() -> None:
    with pytest.raises(InvalidRolloutError, match="input_lengths"):
        check_right_padding(torch.zeros(2, 3), torch.tensor([1]), pad_token_id=0)
