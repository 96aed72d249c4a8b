"""Made-up weights: the same whoever makes them, and what Megatron ranks make of them."""

from __future__ import annotations

import pytest
import torch

from bench import values
from bench.grids import trainer_grid
from bench.megatron_rank import entries, stage_patterns
from bench.models import config, shapes
from weight_sync.manifest import build_catalogue
from weight_sync.plan import matches
from weight_sync.regions import unite
from weight_sync.sources.megatron import MegatronSource

CPU = torch.device("cpu")


def made(shape: tuple[int, ...], version: int = 1, name: str = "w") -> torch.Tensor:
    out = torch.empty(shape, dtype=torch.float32)
    values.fill(out, name, shape, (0,) * len(shape), version)
    return out


def test_a_part_has_the_values_of_its_place_in_the_whole() -> None:
    whole = made((64, 48))
    part = torch.empty(20, 7)
    values.fill(part, "w", (64, 48), (11, 5), 1)
    assert torch.equal(part, whole[11:31, 5:12])


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = made((64, 48))
    monkeypatch.setattr(values, "_BLOCK", 100)
    assert torch.equal(made((64, 48)), whole)


def test_a_view_that_is_not_contiguous_is_filled_in_place() -> None:
    held = torch.zeros(48, 64)
    values.fill(held.T, "w", (64, 48), (0, 0), 1)
    assert torch.equal(held.T, made((64, 48)))


def test_values_differ_between_places_names_and_versions() -> None:
    whole = made((64, 48))
    assert whole.unique().numel() > 0.99 * whole.numel()
    for other in (made((64, 48), version=2), made((64, 48), name="v")):
        assert (whole == other).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["w", "norm.weight"])
def test_a_version_made_of_another_one_is_the_version(dtype: torch.dtype, name: str) -> None:
    made_of, directly = (torch.empty(9, 7, dtype=dtype) for _ in range(2))
    values.fill(made_of, name, (64, 48), (3, 5), 1)
    for versions in ((1, 6), (6, 2), (2, 300)):
        values.change(made_of, name, (64, 48), (3, 5), versions)
        values.fill(directly, name, (64, 48), (3, 5), versions[1])
        assert torch.equal(made_of, directly)


def test_every_element_differs_between_all_versions_of_a_run() -> None:
    versions = torch.stack([made((8, 8), version) for version in range(256)])
    assert all(len(versions[:, i, j].unique()) == 256 for i in range(8) for j in range(8))


def test_values_look_like_weights() -> None:
    whole = made((256, 256))
    assert whole.abs().max() <= 2**-5
    assert whole.mean().abs() < 1e-3
    assert 0.015 < whole.std() < 0.021
    assert (made((256,), name="norm.weight").mean() - 1).abs() < 0.01


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("tiny", "pp=2"),
        ("tiny", "pp=2,tp=2"),
        ("tiny-tied", "tp=2"),
        ("tiny-moe", "ep=2"),
        ("tiny-moe", "tp=2"),
        ("tiny-moe", "pp=2,ep=4"),
        ("tiny-moe", "tp=2,ep=4"),
    ],
)
def test_ranks_of_a_grid_hold_every_element_and_replicas_agree(model: str, text: str) -> None:
    cfg = config(model)
    grid = trainer_grid(text, cfg)
    whole = values.whole(cfg, 3)
    have = {name: torch.full(shape, torch.nan) for name, shape in shapes(cfg)}
    manifests = []
    for rank in range(grid.ranks):
        place = grid.place(rank)
        source = MegatronSource(place, entries(cfg, place, CPU))
        manifests.append(source.manifest(rank, "host", "cpu"))
        for number, (spec, box) in enumerate(manifests[-1].regions()):
            values.fill(source.region(number), spec.name, spec.shape, box.offset, 3)
        # Only now: what one fill writes must not be what another one wrote.
        for number, (spec, box) in enumerate(manifests[-1].regions()):
            at = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
            assert torch.equal(source.region(number), whole[spec.name][at])
            have[spec.name][at] = source.region(number).float()
    assert all(torch.equal(have[name], whole[name].float()) for name in whole)
    unite(build_catalogue(manifests), manifests)


def test_every_name_belongs_to_the_stage_that_holds_it() -> None:
    cfg = config("tiny-moe")
    grid = trainer_grid("pp=2", cfg)
    for rank in range(2):
        place = grid.place(rank)
        names = {r.name for e in entries(cfg, place, CPU) for r in e.regions}
        mine, other = (stage_patterns(cfg, stage, 2) for stage in (rank, 1 - rank))
        assert names
        assert all(matches(name, mine) for name in names)
        assert not any(matches(name, other) for name in names)
