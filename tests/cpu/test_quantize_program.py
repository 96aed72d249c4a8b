"""Compiled quantize programs on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weight_sync.errors import LayoutError, QuantizationError
from weight_sync.quantize.compiler import compile_fp8_tensor, compile_quantize
from weight_sync.quantize.format import Format, scale_dtype, scale_shape
from weight_sync.quantize.reference import encode
from weight_sync.quantize.work import Work


def _work(form: Format, name: str, source: torch.Tensor) -> Work:
    return Work(
        name,
        source,
        torch.full(source.shape, 0xAB, dtype=torch.uint8),
        torch.empty(scale_shape(form, source.shape), dtype=getattr(torch, scale_dtype(form))),
    )


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("form", list(Format))
def test_program_writes_what_the_reference_says(form: Format) -> None:
    works = [
        _work(form, "a", _random(8, 64)),
        _work(form, "b", _random(2, 12, 96).bfloat16()[:, 2:9]),
    ]
    compile_quantize(form, works).run()
    for work in works:
        expected = encode(form, work.source)
        assert torch.equal(work.value, expected.value)
        assert torch.equal(work.scale, expected.scale)


@pytest.mark.parametrize("form", list(Format))
def test_program_follows_the_storage_and_repeats_itself(form: Format) -> None:
    work = _work(form, "a", _random(8, 64))
    program = compile_quantize(form, [work])
    program.run()
    first = work.value.clone(), work.scale.clone()
    program.run()
    assert torch.equal(work.value, first[0])
    assert torch.equal(work.scale, first[1])
    work.source.mul_(-3)
    program.run()
    assert torch.equal(work.value, encode(form, work.source).value)


@pytest.mark.parametrize("form", list(Format))
def test_nbytes_counts_values_and_scales(form: Format) -> None:
    work = _work(form, "a", _random(256, 256))
    scales = {Format.MXFP8: 256 * 8, Format.FP8_TENSOR: 4, Format.FP8_BLOCK: 4 * 4}
    assert compile_quantize(form, [work]).nbytes == 256 * 256 + scales[form]


@pytest.mark.parametrize("form", list(Format))
def test_tensors_with_infinities_are_refused_by_name_until_they_are_gone(form: Format) -> None:
    good, bad = _work(form, "good", _random(8, 64)), _work(form, "bad", _random(8, 64))
    program = compile_quantize(form, [good, bad])
    bad.source[3, 5] = -torch.inf
    program.run()
    with pytest.raises(QuantizationError, match=r"E4M3: bad \(1\)\. "):
        program.check()
    bad.source[3, 5] = 0
    program.run()
    program.check()


def test_shards_of_fp8_per_tensor_agree_through_their_maxima() -> None:
    whole = _random(2, 64, 40)
    works = [_work(Format.FP8_TENSOR, "a", part) for part in whole.split(32, 1)]
    programs = [compile_fp8_tensor([w]) for w in works]
    amax = torch.zeros(2)
    for program in programs:
        program.measure()
        amax = torch.maximum(amax, program.amax)
    for program in programs:
        program.amax.copy_(amax)
        program.cast()
    expected = encode(Format.FP8_TENSOR, whole)
    assert torch.equal(torch.cat([w.value for w in works], 1), expected.value)
    assert all(torch.equal(w.scale, expected.scale) for w in works)


def test_empty_program_and_empty_tensors_are_fine() -> None:
    compile_quantize(Format.MXFP8, []).run()
    program = compile_quantize(Format.MXFP8, [_work(Format.MXFP8, "a", torch.empty(0, 64))])
    program.run()
    program.check()


def test_source_that_is_not_dense_along_k_is_refused_by_name() -> None:
    work = _work(Format.MXFP8, "a.weight", _random(64, 32).T)
    with pytest.raises(LayoutError, match=r"a\.weight has stride 32 along K"):
        compile_quantize(Format.MXFP8, [work])


def test_half_precision_source_is_refused_by_name() -> None:
    work = _work(Format.MXFP8, "a.weight", _random(8, 64).half())
    with pytest.raises(QuantizationError, match=r"a\.weight is float16"):
        compile_quantize(Format.MXFP8, [work])


@pytest.mark.parametrize("part", ["value", "scale"])
def test_destination_of_another_shape_is_refused_by_name(part: str) -> None:
    work = _work(Format.MXFP8, "a.weight", _random(8, 64))
    wrong = replace(work, **{part: getattr(work, part)[:-1]})
    with pytest.raises(QuantizationError, match=rf"the {part} of a\.weight must be uint8"):
        compile_quantize(Format.MXFP8, [wrong])


def test_tensors_on_a_device_without_kernels_are_refused() -> None:
    work = _work(Format.MXFP8, "a", _random(8, 64))
    meta = Work("a", *(t.to("meta") for t in (work.source, work.value, work.scale)))
    with pytest.raises(LayoutError, match="device type 'meta'"):
        compile_quantize(Format.MXFP8, [meta])


def test_tensors_on_two_devices_are_refused() -> None:
    work = _work(Format.MXFP8, "a", _random(8, 64))
    with pytest.raises(LayoutError, match="cpu, meta; compile one program per device"):
        compile_quantize(Format.MXFP8, [work, replace(work, source=work.source.to("meta"))])


def test_destination_with_gaps_is_refused_by_name() -> None:
    work = _work(Format.MXFP8, "a.weight", _random(8, 64))
    gaps = torch.empty(8, 128, dtype=torch.uint8)[:, :64]
    with pytest.raises(LayoutError, match=r"value of a\.weight must be contiguous"):
        compile_quantize(Format.MXFP8, [replace(work, value=gaps)])
