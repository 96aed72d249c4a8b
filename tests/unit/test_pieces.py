"""Flattening pieces to rows and cutting them to tiles keeps every element, in every view."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weight_sync.kernels.pieces import PieceTable, to_rows
from weight_sync.kernels.tiles import cut_tiles, halves, tile_bytes

Element = tuple[int, ...]


def table(
    shape: list[list[int]],
    src: list[tuple[int, list[int]]],
    dst: list[tuple[int, list[int]]],
    index: list[tuple[int, list[int]]],
) -> PieceTable:
    """A float32 table; each view is (offset, strides)."""
    rank = len(shape[0])

    def column(views: list[tuple[int, list[int]]]) -> tuple[np.ndarray, np.ndarray]:
        offsets = np.array([v[0] for v in views], np.int64)
        return offsets, np.array([v[1] for v in views], np.int64).reshape(len(views), rank)

    zeros = np.zeros(len(shape), np.int32)
    return PieceTable(
        "float32",
        "float32",
        np.array(shape, np.int64).reshape(len(shape), rank),
        zeros,
        *column(src),
        zeros,
        *column(dst),
        *column(index),
        np.arange(len(shape), dtype=np.int32),
    )


def elements_of_table(t: PieceTable) -> list[Element]:
    """(piece, src, dst, index) of every element, by plain loops."""
    out = []
    for p in range(len(t)):
        for at in np.ndindex(*t.shape[p].tolist()):
            out.append(
                (
                    p,
                    int(t.src_offset[p] + np.dot(at, t.src_stride[p])),
                    int(t.dst_offset[p] + np.dot(at, t.dst_stride[p])),
                    int(t.index_offset[p] + np.dot(at, t.index_stride[p])),
                )
            )
    return sorted(out)


@st.composite
def tables(draw: st.DrawFn) -> PieceTable:
    """Tables of small boxes: dense, padded, permuted, with ones and zeros among the sizes."""
    rank = draw(st.integers(1, 4))
    count = draw(st.integers(1, 4))
    shapes, views = [], {"src": [], "dst": [], "index": []}
    for _ in range(count):
        shape = draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank))
        shapes.append(shape)
        for side in views:
            stride = [0] * rank
            step = draw(st.integers(1, 2))
            for d in (
                draw(st.permutations(range(rank)))
                if draw(st.booleans())
                else (range(rank - 1, -1, -1))
            ):
                stride[d] = step
                step *= shape[d] + draw(st.sampled_from([0, 0, 1]))
            views[side].append((draw(st.integers(0, 9)), stride))
    return table(shapes, views["src"], views["dst"], views["index"])


@given(tables())
@settings(deadline=None)
def test_rows_hold_every_element_once_in_every_view(t: PieceTable) -> None:
    rows = to_rows(t, ("src", "dst", "index"))
    got = [
        (
            int(rows.piece[m]),
            *(
                int(rows.start[s][m] + r * rows.outer_step[s][m] + i * rows.inner_step[s][m])
                for s in ("src", "dst", "index")
            ),
        )
        for m in range(len(rows.piece))
        for r in range(rows.outer[m])
        for i in range(rows.inner[m])
    ]
    assert sorted(got) == elements_of_table(t)


@given(tables(), st.integers(1, 9))
@settings(deadline=None)
def test_tiles_hold_every_element_once_and_stay_below_the_limit(t: PieceTable, limit: int) -> None:
    base = np.array([1000], np.int64)
    tiles = cut_tiles(t, {"src": base, "dst": base}, limit, index=True)
    assert (tiles.rows * tiles.inner <= limit).all()
    got = [
        (
            int(tiles.slot[m]),
            *(
                int(tiles.start[s][m] + r * tiles.outer_step[s][m] + i * tiles.inner_step[s][m])
                for s in ("src", "dst", "index")
            ),
        )
        for m in range(len(tiles))
        for r in range(tiles.rows[m])
        for i in range(tiles.inner[m])
    ]
    want = [(p, 1000 + 4 * s, 1000 + 4 * d, i) for p, s, d, i in elements_of_table(t)]
    assert sorted(got) == sorted(want)


@given(tables())
@settings(deadline=None)
def test_halves_are_the_two_words_of_every_element(t: PieceTable) -> None:
    want = [
        (p, 2 * s + h, 2 * d + h, 2 * i + h) for p, s, d, i in elements_of_table(t) for h in (0, 1)
    ]
    assert elements_of_table(halves(t)) == sorted(want)


def test_a_contiguous_box_becomes_one_row() -> None:
    dense = (0, [60, 20, 5, 1])
    rows = to_rows(table([[2, 3, 4, 5]], [dense], [dense], [dense]), ("src", "dst", "index"))
    assert (rows.outer.tolist(), rows.inner.tolist()) == ([1], [120])


def test_a_column_slice_becomes_rows_of_its_width() -> None:
    t = table([[8, 4]], [(0, [16, 1])], [(0, [4, 1])], [(0, [16, 1])])
    rows = to_rows(t)
    assert (rows.outer.tolist(), rows.inner.tolist()) == ([8], [4])
    assert rows.outer_step["src"].tolist() == [16]
    assert rows.outer_step["dst"].tolist() == [4]


def test_only_the_named_sides_limit_the_rows() -> None:
    t = table([[8, 4]], [(0, [4, 1])], [(0, [4, 1])], [(0, [16, 1])])
    assert to_rows(t, ("src", "dst")).inner.tolist() == [32]
    assert to_rows(t, ("src", "index")).inner.tolist() == [4]


def test_scalars_become_rows_of_one_element() -> None:
    t = table([[], []], [(3, []), (4, [])], [(0, []), (1, [])], [(0, []), (0, [])])
    rows = to_rows(t)
    assert (rows.outer.tolist(), rows.inner.tolist()) == ([1, 1], [1, 1])
    assert rows.start["src"].tolist() == [3, 4]


@pytest.mark.parametrize("shape", [[0, 3], [3, 0], [0, 0]])
def test_an_empty_box_becomes_no_row(shape: list[int]) -> None:
    view = (0, [3, 1])
    assert len(to_rows(table([shape], [view], [view], [view])).piece) == 0


def test_elements_counts_all_pieces() -> None:
    view = (0, [3, 1])
    t = table([[2, 3], [0, 3], [1, 1]], [view] * 3, [view] * 3, [view] * 3)
    assert t.elements == sum(prod(s) for s in t.shape.tolist()) == 7


def test_take_keeps_the_chosen_pieces() -> None:
    views = [(i, [3, 1]) for i in range(3)]
    t = table([[2, 3], [1, 3], [1, 1]], views, views, views).take(np.array([2, 0]))
    assert t.src_offset.tolist() == [2, 0]
    assert t.shape.tolist() == [[1, 1], [2, 3]]
    assert t.slot.tolist() == [2, 0]


@pytest.mark.parametrize("total", [0, 1 << 20, 16 << 30, 61 << 30, 1 << 40])
def test_tiles_are_between_64_and_256_kib(total: int) -> None:
    assert 64 << 10 <= tile_bytes(total) <= 256 << 10


def test_the_tile_table_of_a_61_gb_model_stays_below_16_mib() -> None:
    total = 61_100_000_000
    assert total / tile_bytes(total) * 48 < 16 << 20
