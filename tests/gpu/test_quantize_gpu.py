"""The CUDA kernels against the CPU reference, bit by bit."""

from __future__ import annotations

from math import prod

import pytest
import torch

from weight_sync.errors import LayoutError, QuantizationError
from weight_sync.quantize.compiler import compile_fp8_tensor, compile_quantize
from weight_sync.quantize.format import Format, scale_dtype, scale_shape
from weight_sync.quantize.reference import encode
from weight_sync.quantize.work import Work

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
SHAPES = [(1, 32), (64, 64), (3, 96), (2, 5, 32), (4, 32, 64), (130, 288), (1, 40032), (5000, 64)]
# Only the float-scaled formats take a K that is no multiple of 32.
ODD_SHAPES = [(1, 1), (3, 5), (129, 257), (2, 130, 100), (5, 20001)]
POISON = 0xAB


def _any_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Every exponent, subnormals, NaN and infinities, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    half = 1 << (8 * dtype.itemsize - 1)
    raw = torch.randint(-half, half, (prod(shape),), generator=generator, dtype=torch.int64)
    return raw.to(BITS[dtype]).view(dtype).reshape(shape)


def _weights(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 0.02).to(dtype)


def _work(form: Format, name: str, source: torch.Tensor) -> Work:
    return Work(
        name,
        source,
        torch.full(source.shape, POISON, dtype=torch.uint8, device="cuda"),
        torch.full(
            scale_shape(form, source.shape),
            77,
            dtype=getattr(torch, scale_dtype(form)),
            device="cuda",
        ),
    )


def _assert_equal(form: Format, work: Work) -> None:
    expected = encode(form, work.source.cpu())
    assert torch.equal(work.value.cpu(), expected.value), f"values of {work.name}"
    assert torch.equal(work.scale.cpu(), expected.scale), f"scales of {work.name}"


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("dtype", list(BITS), ids=str)
@pytest.mark.parametrize("make", [_weights, _any_bits])
def test_one_batch_of_every_shape_is_bit_equal_to_the_reference(form, dtype, make) -> None:
    shapes = SHAPES if form is Format.MXFP8 else SHAPES + ODD_SHAPES
    works = [
        _work(form, f"{shape}", make(shape, dtype, seed).cuda())
        for seed, shape in enumerate(shapes)
    ]
    compile_quantize(form, works).run()
    for work in works:
        _assert_equal(form, work)


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("dtype", list(BITS), ids=str)
@pytest.mark.parametrize(
    "cut",
    [
        (slice(None), slice(None), slice(8, 136)),
        (slice(None), slice(None), slice(1, 129)),
        (slice(1, 3), slice(3, 67), slice(None)),
        (slice(0, 3, 2), slice(None, None, 3), slice(32, 96)),
    ],
    ids=["columns", "odd columns", "rows", "steps"],
)
def test_views_are_read_where_they_lie(form, dtype, cut) -> None:
    source = _any_bits((3, 70, 160), dtype, 7).cuda()[cut]
    work = _work(form, "view", source)
    compile_quantize(form, [work]).run()
    _assert_equal(form, work)


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("offset", range(1, 9))
def test_values_at_any_address_and_nothing_outside_them(form, offset) -> None:
    source = _weights((40, 96), torch.bfloat16, 1).cuda()
    room = torch.full((source.numel() + 64,), POISON, dtype=torch.uint8, device="cuda")
    value = room[offset : offset + source.numel()].view(source.shape)
    work = Work("a", source, value, _work(form, "a", source).scale)
    compile_quantize(form, [work]).run()
    _assert_equal(form, work)
    assert (room[:offset] == POISON).all()
    assert (room[offset + source.numel() :] == POISON).all()


@pytest.mark.parametrize("form", list(Format))
def test_source_at_any_alignment(form) -> None:
    room = _weights((41, 96), torch.bfloat16, 2).cuda().reshape(-1)
    for offset in range(9):
        work = _work(form, f"offset {offset}", room[offset : offset + 40 * 96].view(40, 96))
        compile_quantize(form, [work]).run()
        _assert_equal(form, work)


@pytest.mark.parametrize("form", list(Format))
def test_both_source_dtypes_in_one_program(form) -> None:
    works = [
        _work(form, f"{i}", _weights((33, 64), dtype, i).cuda())
        for i, dtype in enumerate([torch.bfloat16, torch.float32] * 3)
    ]
    compile_quantize(form, works).run()
    for work in works:
        _assert_equal(form, work)


@pytest.mark.parametrize("form", list(Format))
def test_second_run_follows_the_storage_and_equals_a_fresh_program(form) -> None:
    work = _work(form, "a", _weights((64, 128), torch.bfloat16, 3).cuda())
    program = compile_quantize(form, [work])
    program.run()
    work.source.mul_(0.25)
    program.run()
    _assert_equal(form, work)
    first = work.value.clone()
    program.run()
    assert torch.equal(work.value, first)


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("dtype", list(BITS), ids=str)
def test_infinities_are_refused_by_name_with_their_count_until_they_are_gone(form, dtype) -> None:
    shape = (3, 64, 96)
    good, bad = (_work(form, n, _weights(shape, dtype, 4).cuda()) for n in ("good", "bad"))
    program = compile_quantize(form, [good, bad])
    good.source[0, 0, 0] = torch.nan
    bad.source[0, 3, 5], bad.source[2, 63, 95] = torch.inf, -torch.inf
    program.run()
    with pytest.raises(QuantizationError, match=r"E4M3: bad \(2\)\. "):
        program.check()
    bad.source.nan_to_num_(0, 0, 0)
    program.run()
    program.check()


@pytest.mark.parametrize("form", list(Format))
def test_work_runs_on_the_given_stream(form) -> None:
    work = _work(form, "a", _weights((512, 512), torch.bfloat16, 5).cuda())
    program = compile_quantize(form, [work])
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        work.source.mul_(-2)
    program.run(stream.cuda_stream)
    # On any other stream the kernel would have read the source before it was doubled.
    program.check()
    stream.synchronize()
    _assert_equal(form, work)


def test_shards_of_fp8_per_tensor_agree_through_their_maxima() -> None:
    whole = _weights((4, 64, 40), torch.float32, 6)
    works = [_work(Format.FP8_TENSOR, "a", part.cuda()) for part in whole.split(32, 1)]
    programs = [compile_fp8_tensor([w]) for w in works]
    for program in programs:
        program.measure()
    amax = torch.stack([p.amax for p in programs]).amax(0)
    for program in programs:
        program.amax.copy_(amax)
        program.cast()
    expected = encode(Format.FP8_TENSOR, whole)
    assert torch.equal(torch.cat([w.value.cpu() for w in works], 1), expected.value)
    assert all(torch.equal(w.scale.cpu(), expected.scale) for w in works)


def test_empty_tensors_and_experts_are_fine() -> None:
    for form in Format:
        work = _work(form, "a", torch.empty(3, 0, 64, device="cuda"))
        program = compile_quantize(form, [work])
        program.run()
        program.check()
        _assert_equal(form, work)


def test_host_and_device_tensors_do_not_mix() -> None:
    work = _work(Format.MXFP8, "a", torch.ones(8, 64))
    with pytest.raises(LayoutError, match="compile one program per device"):
        compile_quantize(Format.MXFP8, [work])
