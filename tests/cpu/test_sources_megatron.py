"""What a Megatron source offers, against tensors cut by hand as Megatron's layers cut them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch

from weight_sync.errors import LayoutError
from weight_sync.layout import Box
from weight_sync.manifest import Manifest, build_catalogue
from weight_sync.regions import unite
from weight_sync.sources.megatron import MegatronEntry, MegatronSource
from weight_sync.sources.megatron_experts import Stacked, expert_gate_up, expert_split
from weight_sync.sources.megatron_grid import Axis, ParallelGrid
from weight_sync.sources.megatron_layers import (
    fused_gate_up,
    fused_qkv,
    replicated,
    split,
    vocabulary,
)

HIDDEN, INTER, HEADS, KV, DIM = 12, 8, 8, 4, 3


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def qkv_by_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Megatron's fused tensor: per query group its queries, then its key, then its value."""
    groups = zip(q.chunk(KV), k.chunk(KV), v.chunk(KV), strict=True)
    return torch.cat([part for group in groups for part in group])


def exported(
    grids: Sequence[ParallelGrid], entries: Callable[[ParallelGrid], list[MegatronEntry]]
) -> dict[str, torch.Tensor]:
    """Puts the regions of all ranks together; fails on holes and on replicas that differ."""
    manifests: list[Manifest] = []
    out: dict[str, torch.Tensor] = {}
    for rank, grid in enumerate(grids):
        source = MegatronSource(grid, entries(grid))
        manifests.append(source.manifest(rank, "host", "cpu"))
        for number, (spec, box) in enumerate(manifests[-1].regions()):
            whole = out.setdefault(spec.name, torch.full(spec.shape, torch.nan))
            place = whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
            region = source.region(number)
            assert ((place == region) | place.isnan()).all(), spec.name
            place.copy_(region)
    unite(build_catalogue(manifests), manifests)
    return out


def tensor_parallel(size: int) -> list[ParallelGrid]:
    return [ParallelGrid(tp=Axis(size, rank)) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("rest", [(HIDDEN,), ()])
def test_fused_qkv_comes_apart_by_query_group(size: int, rest: tuple[int, ...]) -> None:
    q, k, v = (numbered(n * DIM, *rest) + at for n, at in ((HEADS, 0), (KV, 1000), (KV, 2000)))
    local = qkv_by_groups(q, k, v).chunk(size)
    out = exported(
        tensor_parallel(size),
        lambda g: [fused_qkv(local[g.tp.rank], "qkv", ("q", "k", "v"), HEADS, KV, DIM, rest, g.tp)],
    )
    assert torch.equal(out["q"], q)
    assert torch.equal(out["k"], k)
    assert torch.equal(out["v"], v)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_fused_gate_up_has_gate_rows_first_on_every_rank(size: int) -> None:
    gate, up = numbered(INTER, HIDDEN), numbered(INTER, HIDDEN) + 1000
    local = [torch.cat(pair) for pair in zip(gate.chunk(size), up.chunk(size), strict=True)]
    out = exported(
        tensor_parallel(size),
        lambda g: [fused_gate_up(local[g.tp.rank], "fc1", ("gate", "up"), gate.shape, g.tp)],
    )
    assert torch.equal(out["gate"], gate)
    assert torch.equal(out["up"], up)


@pytest.mark.parametrize(("dim", "transposed"), list(product((0, 1), (False, True))))
def test_split_layers_keep_their_place(dim: int, transposed: bool) -> None:
    whole = numbered(INTER, HIDDEN)
    local = [t.T.contiguous() if transposed else t for t in whole.chunk(2, dim)]
    out = exported(
        tensor_parallel(2),
        lambda g: [
            split(local[g.tp.rank], "w", whole.shape, dim, g.tp, transposed=transposed),
        ],
    )
    assert torch.equal(out["w"], whole)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_vocabulary_padding_is_never_offered(size: int) -> None:
    whole = numbered(100, 4)
    padded = torch.cat([whole, torch.full((28, 4), -1.0)]).chunk(size)
    out = exported(
        tensor_parallel(size), lambda g: [vocabulary(padded[g.tp.rank], "e", (100, 4), 128, g.tp)]
    )
    assert torch.equal(out["e"], whole)


def test_a_rank_with_nothing_but_vocabulary_padding_owns_no_region() -> None:
    grid = ParallelGrid(tp=Axis(4, 3))
    entry = vocabulary(torch.zeros(32, 4), "e", (90, 4), 128, grid.tp)
    assert MegatronSource(grid, [entry]).manifest(3, "host", "cpu").regions() == []


def experts_of(grid: ParallelGrid, whole: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    count = len(whole) // grid.ep.size
    return whole[grid.ep.rank * count : (grid.ep.rank + 1) * count]


def expert_grids(ep: int, etp: int) -> list[ParallelGrid]:
    return [
        ParallelGrid(ep=Axis(ep, e), etp=Axis(etp, t)) for e, t in product(range(ep), range(etp))
    ]


def local_experts(
    grid: ParallelGrid, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    t, n = grid.etp.rank, grid.etp.size
    fc1 = [torch.cat([g.chunk(n)[t], u.chunk(n)[t]]) for g, u in zip(gate, up, strict=True)]
    fc2 = [d.chunk(n, 1)[t].contiguous() for d in down]
    return list(experts_of(grid, fc1)), list(experts_of(grid, fc2))


@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (1, 2), (2, 2), (8, 1)])
@pytest.mark.parametrize("grouped", [False, True])
def test_experts_keep_their_global_number(ep: int, etp: int, grouped: bool) -> None:
    gate, up = numbered(8, INTER, HIDDEN), numbered(8, INTER, HIDDEN) + 1000
    down = numbered(8, HIDDEN, INTER) + 2000

    def entries(grid: ParallelGrid) -> list[MegatronEntry]:
        fc1, fc2 = local_experts(grid, gate, up, down)
        return [
            *expert_gate_up(
                torch.stack(fc1) if grouped else fc1,
                "fc1",
                lambda e: (f"{e}.gate", f"{e}.up"),
                (INTER, HIDDEN),
                8,
                grid,
            ),
            *expert_split(
                torch.stack(fc2) if grouped else fc2,
                "fc2",
                lambda e: f"{e}.down",
                (HIDDEN, INTER),
                1,
                8,
                grid,
            ),
        ]

    out = exported(expert_grids(ep, etp), entries)
    for e in range(8):
        assert torch.equal(out[f"{e}.gate"], gate[e])
        assert torch.equal(out[f"{e}.up"], up[e])
        assert torch.equal(out[f"{e}.down"], down[e])


@pytest.mark.parametrize(("hidden", "inter"), [(64, 32), (64, 64)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_experts_stack_into_fused_transposed_tensors(
    hidden: int, inter: int, interleaved: bool
) -> None:
    gate, up = numbered(8, inter, hidden), numbered(8, inter, hidden) + 0.5
    down = numbered(8, hidden, inter)
    bias = numbered(8, 2 * inter)

    def entries(grid: ParallelGrid) -> list[MegatronEntry]:
        fc1, fc2 = local_experts(grid, gate, up, down)
        fused = Stacked("gate_up", transposed=True, interleaved=interleaved)
        biases = Stacked("gate_up_bias", transposed=True, interleaved=interleaved)
        n, t = grid.etp.size, grid.etp.rank
        halves = [torch.cat([h.chunk(n)[t] for h in b.chunk(2)]) for b in bias]
        local_bias = list(experts_of(grid, halves))
        return [
            *expert_gate_up(fc1, "fc1", fused, (inter, hidden), 8, grid),
            *expert_gate_up(local_bias, "fc1.bias", biases, (inter,), 8, grid),
            *expert_split(
                fc2, "fc2", Stacked("down", transposed=True), (hidden, inter), 1, 8, grid
            ),
        ]

    out = exported(expert_grids(2, 2), entries)
    if interleaved:
        rows, biases = torch.stack([gate, up], 2).flatten(1, 2), torch.stack(bias.chunk(2, 1), 2)
    else:
        rows, biases = torch.cat([gate, up], 1), bias
    assert torch.equal(out["gate_up"], rows.transpose(1, 2))
    assert torch.equal(out["gate_up_bias"], biases.reshape(8, 2 * inter))
    assert torch.equal(out["down"], down.transpose(1, 2))


def test_regions_are_views_of_the_parameter() -> None:
    fused = torch.nn.Parameter(numbered(2 * INTER, HIDDEN))
    grid = ParallelGrid()
    source = MegatronSource(
        grid, [fused_gate_up(fused, "fc1", ("gate", "up"), (INTER, HIDDEN), grid.tp)]
    )
    names = [spec.name for spec, _ in source.manifest(0, "host", "cpu").regions()]
    with torch.no_grad():
        fused[INTER:] = 7.0
    assert (source.region(names.index("up")) == 7.0).all()
    assert not source.region(names.index("gate")).requires_grad


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2), (4, 2)])
def test_virtual_stages_hold_every_layer_once_in_interleaved_order(pp: int, vpp: int) -> None:
    grids = [ParallelGrid(pp=Axis(pp, rank), vpp=vpp) for rank in range(pp)]
    layers = [list(g.layers(16, chunk)) for chunk in range(vpp) for g in grids]
    assert [number for chunk in layers for number in chunk] == list(range(16))


def test_uneven_stages_are_refused() -> None:
    with pytest.raises(LayoutError, match="61 layers"):
        ParallelGrid(pp=Axis(2, 0)).layers(61)


def test_ranks_are_numbered_as_megatron_does() -> None:
    grids = [ParallelGrid.of_rank(r, tp=2, pp=2, ep=2, etp=1, dp=2) for r in range(8)]
    assert [g.tp.rank for g in grids] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [g.dp.rank for g in grids] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [g.ep.rank for g in grids] == [0, 1, 0, 1, 0, 1, 0, 1]
    assert [g.pp.rank for g in grids] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_an_embedding_copy_on_the_last_stage_is_a_replica() -> None:
    embed = numbered(6, 4)
    stages = [ParallelGrid(pp=Axis(2, 0)), ParallelGrid(pp=Axis(2, 1))]
    manifests = [
        MegatronSource(g, [vocabulary(embed.clone(), "embed", (6, 4), 6, g.tp)]).manifest(
            rank, "host", "cpu"
        )
        for rank, g in enumerate(stages)
    ]
    regions = unite(build_catalogue(manifests), manifests)
    assert regions.owner_rank.tolist() == [0, 1]
    assert regions.owner_first.tolist() == [0, 2]


def test_a_second_copy_on_the_same_rank_is_offered_once() -> None:
    grid = ParallelGrid()
    entries = [replicated(numbered(4), "norm", (4,)), replicated(numbered(4), "norm", (4,))]
    manifest = MegatronSource(grid, entries).manifest(0, "host", "cpu")
    assert [box for _, box in manifest.regions()] == [Box((0,), (4,))]


def test_moved_storage_raises_the_generation() -> None:
    parameter = torch.nn.Parameter(numbered(4))
    source = MegatronSource(ParallelGrid(), [replicated(parameter, "norm", (4,))])
    before = source.manifest(0, "host", "cpu").generation
    assert source.manifest(0, "host", "cpu").generation == before
    parameter.data = numbered(4).clone()
    assert source.manifest(0, "host", "cpu").generation == before + 1


def test_a_dtype_that_changed_after_the_description_is_refused() -> None:
    parameter = torch.nn.Parameter(numbered(4))
    source = MegatronSource(ParallelGrid(), [replicated(parameter, "norm", (4,))])
    source.manifest(0, "host", "cpu")
    parameter.data = parameter.data.to(torch.bfloat16)
    with pytest.raises(LayoutError, match=r"norm is torch\.bfloat16 .* as torch\.float32"):
        source.region(0)


def test_a_missing_tensor_parallel_flag_is_refused_with_both_shapes() -> None:
    grid = ParallelGrid(ep=Axis(1, 0), etp=Axis(2, 0))
    local = [torch.zeros(64, 16) for _ in range(8)]
    with pytest.raises(LayoutError) as refusal:
        MegatronSource(
            grid,
            expert_split(local, "experts.fc2.", lambda e: f"{e}.down", (64, 32), None, 8, grid),
        )
    message = str(refusal.value)
    assert "experts.fc2.0 has local shape (64, 16)" in message
    assert "expected (64, 32): global shape (64, 32), not cut" in message


def test_a_tensor_that_is_global_already_is_not_multiplied_by_tp() -> None:
    grid = ParallelGrid(tp=Axis(2, 0))
    with pytest.raises(LayoutError, match=r"e has local shape \(128, 4\).* expected \(64, 4\)"):
        MegatronSource(grid, [vocabulary(torch.zeros(128, 4), "e", (100, 4), 128, grid.tp)])


def test_a_forgotten_transpose_is_refused() -> None:
    grid = ParallelGrid()
    with pytest.raises(LayoutError, match=r"down has local shape \(32, 64\)"):
        MegatronSource(grid, [split(torch.zeros(32, 64), "down", (64, 32), 1, grid.tp)])


def test_a_wrong_number_of_local_experts_is_refused() -> None:
    grid = ParallelGrid(ep=Axis(4, 1))
    with pytest.raises(LayoutError, match=r"fc2 has 3 local experts .* expected 2 of 8"):
        expert_split([torch.zeros(4, 4)] * 3, "fc2", str, (4, 4), 1, 8, grid)


def test_query_groups_that_do_not_divide_are_refused() -> None:
    with pytest.raises(LayoutError, match="8 heads in 4 groups do not divide over 8 ranks"):
        fused_qkv(torch.zeros(1), "qkv", ("q", "k", "v"), HEADS, KV, DIM, (), Axis(8, 0))


def test_an_axis_of_another_grid_is_refused() -> None:
    with pytest.raises(LayoutError, match="neither tp nor etp"):
        MegatronSource(ParallelGrid(), [split(torch.zeros(2, 4), "w", (4, 4), 0, Axis(2, 0))])


def test_entries_that_disagree_about_a_name_are_refused() -> None:
    entries = [replicated(torch.zeros(4), "w", (4,)), replicated(torch.zeros(5), "w", (5,))]
    with pytest.raises(LayoutError, match="both must agree"):
        MegatronSource(ParallelGrid(), entries)
