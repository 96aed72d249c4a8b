"""A source that quantizes: same bytes as the reference, pairs in units, memory that stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.sources import BoxSource, Held
from tests.harness.sources import rows as rows_of
from tests.harness.trainers import Holder
from tests.unit.plan_cases import Slice, recording
from weight_sync.buckets import cut
from weight_sync.errors import QuantizationError
from weight_sync.layout import Box
from weight_sync.manifest import Manifest, build_catalogue
from weight_sync.membership import Membership
from weight_sync.plan import build_plan
from weight_sync.quantize.format import Format, scale_shape, scale_suffix
from weight_sync.quantize.negotiate import check_buckets
from weight_sync.quantize.reference import encode
from weight_sync.quantize.wanted import QuantSpec, want
from weight_sync.sources.module import ModuleSource
from weight_sync.sources.quantized import QuantizedSource
from weight_sync.worker.wanted import format_by_scale


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def served(source: QuantizedSource, manifest: Manifest) -> dict[str, list[torch.Tensor]]:
    """Regions by name, in order."""
    out: dict[str, list[torch.Tensor]] = {}
    for number, (spec, box) in enumerate(manifest.regions()):
        tensor = source.region(number)
        assert tuple(tensor.shape) == box.size
        assert str(tensor.dtype) == f"torch.{spec.dtype}"
        out.setdefault(spec.name, []).append(tensor)
    return out


def quantize(
    tensors: dict[str, torch.Tensor], *specs: QuantSpec
) -> tuple[QuantizedSource, dict[str, list[torch.Tensor]]]:
    source = QuantizedSource(ModuleSource(Holder(tensors)), specs)
    manifest = source.manifest(0, "host", "cpu")
    source.prepare()
    source.check()
    return source, served(source, manifest)


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("shape", [(256, 384), (3, 128, 256)], ids=["matrix", "experts"])
def test_values_and_scales_are_those_of_the_reference(form: Format, shape: tuple[int, ...]) -> None:
    x = random(*shape)
    _, regions = quantize({"a.weight": x, "norm": x[0, 0]}, want("a.weight", form, shape))
    encoded = encode(form, x)
    (value,), (scale,) = regions["a.weight"], regions["a.weight" + scale_suffix(form)]
    assert torch.equal(value.view(torch.uint8), encoded.value)
    assert torch.equal(scale, encoded.scale)
    assert torch.equal(regions["norm"][0], x[0, 0])


def test_prepare_follows_weights_that_changed_in_place() -> None:
    x = random(32, 64)
    source, regions = quantize({"a.weight": x}, want("a.weight", Format.MXFP8, (32, 64)))
    before = source.fingerprint()
    x.neg_()
    source.prepare()
    assert source.fingerprint() == before
    assert torch.equal(regions["a.weight"][0].view(torch.uint8), encode(Format.MXFP8, x).value)


def test_tied_tensors_share_one_value() -> None:
    module = Holder({"a.weight": random(32, 64)})
    module.add_module("b", torch.nn.Module())
    module.b.register_parameter("weight", module.a.weight)
    specs = [want(f"{n}.weight", Format.MXFP8, (32, 64)) for n in "ab"]
    source = QuantizedSource(ModuleSource(module), specs)
    manifest = source.manifest(0, "host", "cpu")
    source.prepare()
    regions = served(source, manifest)
    assert regions["a.weight"][0].data_ptr() == regions["b.weight"][0].data_ptr()
    aliases = {t.name: t.alias_of for t in manifest.tensors}
    assert aliases["b.weight_scale"] == "a.weight_scale"


def test_parts_of_one_matrix_on_one_rank_get_the_scale_of_the_whole() -> None:
    x = random(64, 128)
    x[40, 3] = 100.0
    parts = [(Box((0, 0), (32, 128)), x[:32]), (Box((32, 0), (32, 128)), x[32:])]
    base = BoxSource({"a.weight": Held((64, 128), "bfloat16", parts)})
    source = QuantizedSource(
        base, [want("a.weight", Format.FP8_TENSOR, (64, 128))], reduce_max=lambda vector: None
    )
    manifest = source.manifest(0, "host", "cpu")
    source.prepare()
    regions = served(source, manifest)
    encoded = encode(Format.FP8_TENSOR, x)
    assert [float(s) for s in regions["a.weight_scale"]] == [float(encoded.scale)] * 2
    both = torch.cat([t.view(torch.uint8) for t in regions["a.weight"]])
    assert torch.equal(both, encoded.value)


def test_rank_without_any_wanted_tensor_takes_part_in_the_reduction() -> None:
    seen = []
    source = QuantizedSource(
        ModuleSource(Holder({"norm": random(64)})),
        [want("far.weight", Format.FP8_TENSOR, (4, 64, 64))],
        reduce_max=lambda vector: seen.append(tuple(vector.shape)),
    )
    source.manifest(0, "host", "cpu")
    source.prepare()
    assert seen == [(4,)]


def test_every_infinite_tensor_is_named() -> None:
    bad = random(32, 64)
    bad[0, 0] = float("inf")
    specs = [want(f"{n}.weight", Format.MXFP8, (32, 64)) for n in "abc"]
    source = QuantizedSource(
        ModuleSource(Holder({"a.weight": bad, "b.weight": random(32, 64), "c.weight": bad})), specs
    )
    source.manifest(0, "host", "cpu")
    source.prepare()
    with pytest.raises(QuantizationError, match=r"a\.weight \(1\), c\.weight \(1\)"):
        source.check()


@settings(deadline=None, max_examples=40)
@given(limit=st.integers(1, 40_000), rows=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_no_bucket_size_separates_a_value_from_its_scale(limit: int, rows: list[int]) -> None:
    """Two ranks hold halves of each tensor; every stream of the plan is cut at every size."""
    specs = [want(f"t{i}.weight", Format.MXFP8, (2 * n, 64)) for i, n in enumerate(rows)]
    full = {s.name: random(*s.value_shape) for s in specs}
    manifests = []
    for rank in range(2):
        held = {
            spec.name: rows_of(full[spec.name], rank * n, (rank + 1) * n)
            for spec, n in zip(specs, rows, strict=True)
        }
        manifests.append(QuantizedSource(BoxSource(held), specs).manifest(rank, "host", "cpu"))
    catalogue = build_catalogue(manifests)
    # The engine reads all scales before all values, the worst order for packing.
    order = sorted(catalogue.tensors, key=lambda t: (t.dtype != "uint8", t.name))
    slices = [Slice(t, Box((0,) * len(t.shape), t.shape)) for t in order]
    plan = build_plan(Membership(1, 2, (0,), 1), manifests, [recording(slices)])
    for rank in range(2):
        mine = plan.sent(0, rank)
        pieces = plan.pieces[0]
        tensor = pieces.tensor[mine]
        buckets = cut(pieces.nbytes[mine], plan.units[tensor], limit)
        names = [
            {catalogue.tensors[t].name for t in tensor[buckets.bucket == b].tolist()}
            for b in range(buckets.count)
        ]
        assert sum(len(n) for n in names) == 2 * len(specs)
        check_buckets(names, specs)
    assert np.concatenate([plan.sent(0, r) for r in range(2)]).size == 4 * len(specs)


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("shape", [(256, 384), (4, 256, 128)], ids=["matrix", "experts"])
def test_engine_format_is_told_by_its_scale(form: Format, shape: tuple[int, ...]) -> None:
    dtype = torch.uint8 if form is Format.MXFP8 else torch.float32
    scale = torch.empty(scale_shape(form, shape) or (1,), dtype=dtype, device="meta")
    assert format_by_scale(shape, scale) is form


@pytest.mark.parametrize(
    ("shape", "scale", "dtype"),
    [
        ((256, 384), (256, 1), torch.float32),
        ((256, 384), (4, 6), torch.float32),
        ((256, 384), (256, 12), torch.float8_e8m0fnu),
        ((256, 384), (256, 24), torch.uint8),
        ((256,), (8,), torch.uint8),
    ],
    ids=["per channel", "64x64 blocks", "another dtype", "blocks of 16", "a vector"],
)
def test_other_formats_are_not_taken_for_ours(
    shape: tuple[int, ...], scale: tuple[int, ...], dtype: torch.dtype
) -> None:
    assert format_by_scale(shape, torch.empty(scale, dtype=dtype, device="meta")) is None
