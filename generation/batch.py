"""The batch that travels between a trainer and the fleet: a dict of tensors and per-sample lists.

Dimension 0 of every tensor, and the length of every list, is the sample. A batch is split over the
shards in sample order and joined back with right padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from generation.errors import InvalidRolloutError


class Batch(dict[str, Any]):
    """Named columns of equal length; a ``dict`` so that callers may pass a plain one.

    Args:
        columns: Tensors of shape ``[samples, ...]`` or lists of one entry per sample.

    Raises:
        InvalidRolloutError: Columns of unequal length, 0-dim tensors, or other types.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        super().__init__(columns)
        lengths = {name: _column_length(name, value) for name, value in self.items()}
        if len(set(lengths.values())) > 1:
            raise InvalidRolloutError(
                f"columns of one batch must have one entry per sample, got {lengths}; "
                "drop or repeat the columns that differ"
            )
        self.size: int = next(iter(lengths.values()), 0)

    def require(self, *names: str) -> None:
        """Raises InvalidRolloutError naming every column of ``names`` that is missing."""
        missing = [name for name in names if name not in self]
        if missing:
            raise InvalidRolloutError(
                f"batch lacks {', '.join(missing)}; it has {', '.join(sorted(self)) or 'nothing'}"
            )

    def rows(self, start: int, stop: int) -> Batch:
        """Returns samples ``start`` to ``stop``; tensors are views."""
        return Batch({name: value[start:stop] for name, value in self.items()})

    def shard(self, count: int, allow_uneven: bool = False) -> list[Batch]:
        """Splits into ``count`` consecutive parts, in sample order.

        Args:
            count: Number of parts, at least 1.
            allow_uneven: When the size is not a multiple, the first parts get one sample more
                (parts may be empty). Otherwise that is an error.

        Raises:
            InvalidRolloutError: ``count`` below 1, or uneven without ``allow_uneven``.
        """
        if count < 1:
            raise InvalidRolloutError(f"a batch is split into at least 1 part, not {count}")
        each, extra = divmod(self.size, count)
        if extra and not allow_uneven:
            raise InvalidRolloutError(
                f"{self.size} samples do not divide over {count} parts; pass allow_uneven=True"
            )
        bounds = [part * each + min(part, extra) for part in range(count + 1)]
        return [self.rows(bounds[part], bounds[part + 1]) for part in range(count)]

    @classmethod
    def concat(cls, batches: Iterable[Batch], pad: Mapping[str, float] | None = None) -> Batch:
        """Joins batches in order, right-padding dimension 1 to the widest.

        Args:
            batches: Batches with the same columns, at least one.
            pad: Padding value per column, e.g. ``{"output_ids": pad_token_id}``; 0 where absent.

        Raises:
            InvalidRolloutError: No batch, unlike columns, dtypes or trailing shapes.
        """
        parts = list(batches)
        if not parts:
            raise InvalidRolloutError("nothing to join: pass at least one batch")
        for part in parts[1:]:
            if set(part) != set(parts[0]):
                raise InvalidRolloutError(
                    f"batches to join differ in columns: {sorted(set(part) ^ set(parts[0]))}"
                )
        values = dict(pad or {})
        return cls(
            {name: _join(name, [p[name] for p in parts], values.get(name, 0)) for name in parts[0]}
        )


def check_right_padding(
    input_ids: torch.Tensor, input_lengths: torch.Tensor, pad_token_id: int
) -> None:
    """Checks that every prompt starts at column 0 and is followed by padding only.

    Args:
        input_ids: Integer tensor ``[samples, width]``.
        input_lengths: Integer tensor ``[samples]``, number of valid tokens.
        pad_token_id: The id that fills the rest of each row. It may also occur inside a prompt.

    Raises:
        InvalidRolloutError: Wrong shapes, a length outside 0..width, or a row padded elsewhere.
    """
    if input_ids.dim() != 2 or input_lengths.shape != input_ids.shape[:1]:
        raise InvalidRolloutError(
            "input_ids must be [samples, width] with input_lengths [samples], got "
            f"{tuple(input_ids.shape)} and {tuple(input_lengths.shape)}"
        )
    width = input_ids.shape[1]
    bad = ((input_lengths < 0) | (input_lengths > width)).nonzero().flatten().tolist()
    if bad:
        raise InvalidRolloutError(
            f"input_lengths of samples {bad[:8]} lie outside 0..{width}, the width of input_ids"
        )
    column = torch.arange(width, device=input_ids.device)
    beyond = column[None, :] >= input_lengths.to(input_ids.device)[:, None]
    bad = (beyond & (input_ids != pad_token_id)).any(dim=1).nonzero().flatten().tolist()
    if bad:
        raise InvalidRolloutError(
            f"samples {bad[:8]} hold tokens other than pad id {pad_token_id} after their "
            "input_lengths; pad prompts on the right"
        )


def _column_length(name: str, value: object) -> int:
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return int(value.shape[0])
    if isinstance(value, (list, tuple)):
        return len(value)
    raise InvalidRolloutError(
        f"column {name} must be a tensor of at least one dimension or a list, got {value!r:.80}"
    )


def _join(name: str, values: Sequence[Any], pad: float) -> Any:  # noqa: ANN401 - as stored
    if not all(isinstance(value, torch.Tensor) for value in values):
        if any(isinstance(value, torch.Tensor) for value in values):
            raise InvalidRolloutError(
                f"column {name} is a tensor in some batches, a list in others"
            )
        return [entry for value in values for entry in value]
    kinds = {(value.dtype, value.dim(), value.shape[2:]) for value in values}
    if len(kinds) > 1:
        raise InvalidRolloutError(
            f"column {name} differs in dtype or shape: {sorted(map(str, kinds))}"
        )
    if values[0].dim() < 2:
        return torch.cat(list(values))
    samples = sum(value.shape[0] for value in values)
    width = max(value.shape[1] for value in values)
    joined = values[0].new_full((samples, width, *values[0].shape[2:]), pad)
    row = 0
    for value in values:
        joined[row : row + value.shape[0], : value.shape[1]] = value
        row += value.shape[0]
    return joined
