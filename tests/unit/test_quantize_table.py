"""The tables GPU kernels run from touch every element of every tensor exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from weight_sync.layout import contiguous_strides
from weight_sync.quantize.format import Format, scale_shape
from weight_sync.quantize.table import JobTable, Operand, job_table, matrices

SHAPES = [
    (1, 32),
    (64, 96),
    (3, 5, 64),
    (2, 2, 3, 32),
    (130, 288),
    (2, 20000),
    (1, 40000),
    (700, 32),
    (0, 64),
]


def _operand(shape: tuple[int, ...], pad_rows: int, pad_cols: int, itemsize: int) -> Operand:
    outer = (*shape[:-2], shape[-2] + pad_rows, shape[-1] + pad_cols)
    return Operand(shape, contiguous_strides(outer), 4096 * itemsize, 1 << 40, 1 << 50, 0)


def _elements(table: JobTable, itemsize: int) -> Iterator[tuple[int, int]]:
    """(source address in elements, value address), walked as ``struct Tile`` of the kernels."""
    for block, number in enumerate(table.tile_job):
        job = table.jobs[number]
        source, value, _, rows, cols, stride, first, across, tile_rows, tile_cols = job[
            :10
        ].tolist()
        row0 = (block - first) // across * tile_rows
        col0 = (block - first) % across * tile_cols
        for row in range(row0, min(row0 + tile_rows, rows)):
            for col in range(col0, min(col0 + tile_cols, cols)):
                yield source // itemsize + row * stride + col, value + row * cols + col


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pad", [(0, 0), (0, 8), (3, 0)], ids=str)
def test_every_element_is_written_once_from_its_own_source(
    form: Format, shape: tuple[int, ...], pad: tuple[int, int]
) -> None:
    operand = _operand(shape, *pad, 2)
    table = job_table(form, list(matrices(form, operand, 2)), 2)
    index = np.indices(shape).reshape(len(shape), -1)
    source = 4096 + np.array(operand.stride) @ index
    expected = Counter(
        zip(source.tolist(), range(1 << 40, (1 << 40) + index.shape[1]), strict=True)
    )
    assert Counter(_elements(table, 2)) == expected


@pytest.mark.parametrize("pad", [(0, 0), (0, 8)], ids=str)
def test_each_fp8_block_has_one_tile_and_its_own_scale(pad: tuple[int, int]) -> None:
    shape = (3, 130, 300)
    table = job_table(
        Format.FP8_BLOCK, list(matrices(Format.FP8_BLOCK, _operand(shape, *pad, 2), 2)), 2
    )
    scales = [
        int(table.jobs[job, 2]) + 4 * (tile - int(table.jobs[job, 6]))
        for tile, job in enumerate(table.tile_job)
    ]
    count = int(np.prod(scale_shape(Format.FP8_BLOCK, shape)))
    assert scales == [(1 << 50) + 4 * i for i in range(count)]


def test_every_expert_of_fp8_per_tensor_has_a_scale_and_a_counter_even_when_empty() -> None:
    table = job_table(
        Format.FP8_TENSOR,
        list(matrices(Format.FP8_TENSOR, _operand((3, 0, 8), 0, 0, 4), 4)),
        4,
    )
    assert table.jobs[:, 10].tolist() == [0, 1, 2]
    assert table.tile_job.tolist() == [0, 1, 2]
    assert table.jobs[:, 2].tolist() == [(1 << 50) + 4 * i for i in range(3)]


def test_dense_tensor_is_one_long_row() -> None:
    (only,) = matrices(Format.MXFP8, _operand((4, 32, 64), 0, 0, 2), 2)
    assert (only.rows, only.cols) == (1, 4 * 32 * 64)


@pytest.mark.parametrize(
    ("source", "value", "stride", "cols", "wide"),
    [
        (16, 8, 64, 64, 1),
        (8, 8, 64, 64, 0),
        (16, 4, 64, 64, 0),
        (16, 8, 65, 64, 0),
        (16, 8, 64, 60, 0),
    ],
)
def test_wide_accesses_only_where_all_addresses_allow_them(
    source: int, value: int, stride: int, cols: int, wide: int
) -> None:
    operand = Operand((4, cols), (stride, 1), source, value, 0, 0)
    table = job_table(Format.FP8_BLOCK, list(matrices(Format.FP8_BLOCK, operand, 2)), 2)
    assert table.jobs[:, 11].tolist() == [wide]
