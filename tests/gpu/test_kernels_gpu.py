"""The CUDA kernels against the shared cases, and what only a GPU has: streams, peers, mappings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests import kernel_cases as kc
from weight_sync.errors import LayoutError
from weight_sync.kernels.base import RawBuffer
from weight_sync.kernels.compiler import compile_copy, compile_digest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = "cuda:0"


@pytest.mark.parametrize("case", kc.CASES, ids=lambda c: c.name)
def test_copy_writes_the_pieces_and_nothing_else(case: kc.Case) -> None:
    kc.check_copy(case, DEVICE)


@pytest.mark.parametrize("case", kc.CASES, ids=lambda c: c.name)
def test_digest_of_the_source_is_the_defined_one(case: kc.Case) -> None:
    kc.check_source_digest(case, DEVICE)


@pytest.mark.parametrize("case", kc.CASES, ids=lambda c: c.name)
def test_digest_of_the_destination_equals_that_of_the_source(case: kc.Case) -> None:
    kc.check_destination_digest(case, DEVICE)


@pytest.mark.parametrize("dtypes", kc.ALIGNMENT_DTYPES, ids="-".join)
def test_copy_works_at_every_byte_alignment(dtypes: tuple[str, str]) -> None:
    for case in kc.alignments(*dtypes):
        kc.check_copy(case, DEVICE)


@pytest.mark.parametrize("dtypes", kc.ALIGNMENT_DTYPES, ids="-".join)
def test_digest_works_at_every_byte_alignment(dtypes: tuple[str, str]) -> None:
    for case in kc.alignments(*dtypes)[:16]:
        kc.check_source_digest(case, DEVICE)


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float32", "int64"])
def test_digest_sees_every_single_flipped_bit(dtype: str) -> None:
    kc.check_flipped_bits(dtype, DEVICE)


def test_digest_does_not_depend_on_order_or_cuts() -> None:
    kc.check_cuts(DEVICE)


def _spread(case: kc.Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return kc.place(case.src, 0, DEVICE), kc.place(case.dst, 0, DEVICE)


def test_copy_runs_in_order_on_the_given_stream() -> None:
    case = kc.dense(1 << 20, "uint8")
    src, dst = _spread(case)
    program = compile_copy([case.table], src, dst)
    source = torch.from_numpy(case.src[0]).to(DEVICE)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        src[0].zero_()
        # Long enough that a copy on another stream would read the zeros.
        torch.cuda._sleep(20_000_000)
        src[0].copy_(source)
    program.run(stream.cuda_stream)
    stream.synchronize()
    np.testing.assert_array_equal(dst[0].cpu().numpy(), kc.expected_copy(case)[0])


def test_copy_runs_on_the_current_stream_by_default() -> None:
    case = kc.dense(1 << 20, "uint8")
    src, dst = _spread(case)
    program = compile_copy([case.table], src, dst)
    source = torch.from_numpy(case.src[0]).to(DEVICE)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream(DEVICE)
    with torch.cuda.stream(stream):
        src[0].zero_()
        torch.cuda._sleep(20_000_000)
        src[0].copy_(source)
        program.run()
    stream.synchronize()
    np.testing.assert_array_equal(dst[0].cpu().numpy(), kc.expected_copy(case)[0])


def test_mapped_memory_is_read_like_a_tensor() -> None:
    case = kc.rows(700, 256, "bfloat16", (256, 0))
    src, dst = _spread(case)
    mapped = [RawBuffer(b.data_ptr(), b.numel(), 0) for b in src]
    compile_copy([case.table], mapped, dst).run()
    np.testing.assert_array_equal(dst[0].cpu().numpy(), kc.expected_copy(case)[0])
    sums = compile_digest([case.table], mapped, "src", 1).run()
    np.testing.assert_array_equal(sums, kc.expected_digest(case))


def test_mapped_memory_of_another_device_is_refused() -> None:
    case = kc.dense(64, "uint8")
    src, dst = _spread(case)
    mapped = [RawBuffer(src[0].data_ptr(), src[0].numel(), 1)]
    with pytest.raises(LayoutError, match="receiving device"):
        compile_copy([case.table], mapped, dst)


def test_a_mapping_shorter_than_its_pieces_is_refused() -> None:
    case = kc.dense(64, "uint8")
    src, dst = _spread(case)
    with pytest.raises(LayoutError, match="piece 0"):
        compile_copy([case.table], [RawBuffer(src[0].data_ptr(), 63, 0)], dst)


def test_host_and_device_buffers_do_not_mix() -> None:
    case = kc.dense(64, "uint8")
    with pytest.raises(LayoutError, match="cpu and cuda"):
        compile_copy([case.table], kc.place(case.src, 0, "cpu"), kc.place(case.dst, 0, DEVICE))


def test_a_digest_can_run_again_after_the_bytes_changed() -> None:
    case = kc.dense(1000, "bfloat16")
    src, _ = _spread(case)
    program = compile_digest([case.table], src, "src", 1)
    first = program.run().tolist()
    src[0][0] ^= 1
    changed = program.run().tolist()
    src[0][0] ^= 1
    assert changed != first
    assert program.run().tolist() == first == kc.expected_digest(case).tolist()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_copy_reads_a_peer_from_the_receiving_device() -> None:
    case = kc.rows(701, 129, "bfloat16", (8, 3))
    src, dst = kc.place(case.src, 0, "cuda:1"), kc.place(case.dst, 0, DEVICE)
    torch.cuda.synchronize(1)
    compile_copy([case.table], src, dst).run()
    np.testing.assert_array_equal(dst[0].cpu().numpy(), kc.expected_copy(case)[0])
