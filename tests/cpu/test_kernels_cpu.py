"""The CPU kernels against the shared cases, and what only the CPU has: threads and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import kernel_cases as kc
from weight_sync.errors import LayoutError
from weight_sync.kernels.compiler import compile_copy, compile_digest


@pytest.mark.parametrize("case", kc.CASES, ids=lambda c: c.name)
def test_copy_writes_the_pieces_and_nothing_else(case: kc.Case) -> None:
    kc.check_copy(case, "cpu")


@pytest.mark.parametrize("case", kc.CASES, ids=lambda c: c.name)
def test_digest_of_the_source_is_the_defined_one(case: kc.Case) -> None:
    kc.check_source_digest(case, "cpu")


@pytest.mark.parametrize("case", kc.CASES, ids=lambda c: c.name)
def test_digest_of_the_destination_equals_that_of_the_source(case: kc.Case) -> None:
    kc.check_destination_digest(case, "cpu")


@pytest.mark.parametrize("dtypes", kc.ALIGNMENT_DTYPES, ids="-".join)
def test_copy_works_at_every_byte_alignment(dtypes: tuple[str, str]) -> None:
    for case in kc.alignments(*dtypes):
        kc.check_copy(case, "cpu")


@pytest.mark.parametrize("dtypes", kc.ALIGNMENT_DTYPES, ids="-".join)
def test_digest_works_at_every_byte_alignment(dtypes: tuple[str, str]) -> None:
    for case in kc.alignments(*dtypes)[:16]:
        kc.check_source_digest(case, "cpu")


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
def test_digest_sees_every_single_flipped_bit(dtype: str) -> None:
    kc.check_flipped_bits(dtype, "cpu")


def test_digest_does_not_depend_on_order_or_cuts() -> None:
    kc.check_cuts("cpu")


def test_copy_counts_the_bytes_it_writes() -> None:
    case = kc.dense(1000, "float32", "bfloat16")
    program = compile_copy([case.table], kc.place(case.src, 0, "cpu"), kc.place(case.dst, 0, "cpu"))
    assert program.nbytes == 2000


@pytest.mark.parametrize(
    "case",
    [kc.dense(9_000_001, "uint8"), kc.rows(900, 6_001, "uint8", (0, 5))],
    ids=lambda c: c.name,
)
def test_threads_together_do_all_the_work(case: kc.Case) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        kc.check_copy(case, "cpu")
        kc.check_source_digest(case, "cpu")
    finally:
        torch.set_num_threads(before)


def test_several_tables_share_one_program() -> None:
    a, b = kc.dense(100, "bfloat16", seed=1), kc.dense(60, "float32", "float16", seed=2)
    second = replace(
        b.table,
        src_buffer=b.table.src_buffer + 1,
        dst_buffer=b.table.dst_buffer + 1,
        slot=b.table.slot + 1,
    )
    src = kc.place(a.src + b.src, 0, "cpu")
    dst = kc.place(a.dst + b.dst, 0, "cpu")
    compile_copy([a.table, second], src, dst).run()
    sums = compile_digest([a.table, second], dst, "dst", 2).run()
    want = [*kc.expected_digest(a).tolist(), *kc.expected_digest(b).tolist()]
    assert sums.tolist() == want


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize(
    "change",
    [
        {"offset": 1},
        {"offset": -1},
        {"stride": 2},
        {"stride": 1 << 61},
        {"buffer": 1},
        {"buffer": -1},
    ],
    ids=str,
)
def test_a_piece_outside_its_buffer_is_named_and_refused(side: str, change: dict[str, int]) -> None:
    pieces = [
        kc.Piece((4,), kc.View(0, 0, (1,)), kc.View(0, 0, (1,)), kc.View(0, 0, (1,))),
        kc.Piece((4,), kc.View(0, 4, (1,)), kc.View(0, 4, (1,)), kc.View(0, 4, (1,))),
    ]
    table = kc.table_of(pieces, "float32", "float32")
    what, value = next(iter(change.items()))
    values = getattr(table, f"{side}_{what}").copy()
    values[1] = value if what != "offset" else values[1] + value * 5
    table = replace(table, **{f"{side}_{what}": values})
    src, dst = torch.zeros(32, dtype=torch.uint8), torch.zeros(32, dtype=torch.uint8)
    with pytest.raises(LayoutError, match="piece 1"):
        compile_copy([table], [src], [dst])


def test_a_negative_size_is_refused() -> None:
    case = kc.dense(8, "float32")
    table = replace(case.table, shape=np.array([[-8]]))
    with pytest.raises(LayoutError, match="negative"):
        compile_digest([table], kc.place(case.src, 0, "cpu"), "src", 1)


def test_a_digest_slot_that_does_not_exist_is_refused() -> None:
    case = kc.dense(8, "float32")
    table = replace(case.table, slot=np.array([1], np.int32))
    with pytest.raises(LayoutError, match="slot 1 of 1"):
        compile_digest([table], kc.place(case.src, 0, "cpu"), "src", 1)


def test_a_cast_that_no_kernel_has_is_refused() -> None:
    case = kc.dense(8, "float32")
    table = replace(case.table, dst_dtype="int32")
    with pytest.raises(LayoutError, match="float32 to int32"):
        compile_copy([table], kc.place(case.src, 0, "cpu"), kc.place(case.dst, 0, "cpu"))


def test_a_buffer_that_is_not_flat_bytes_is_refused() -> None:
    case = kc.dense(8, "float32")
    with pytest.raises(LayoutError, match="1-D uint8"):
        compile_copy([case.table], [torch.zeros(8)], kc.place(case.dst, 0, "cpu"))
