"""What a module source offers of FSDP2, tensor-parallel and hybrid modules, on real gloo ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from source_ranks import (
    CollectiveRanError,
    NoCollectives,
    Offer,
    Ranks,
    fill,
    filled,
    show,
    source_ranks,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from weight_sync.errors import LayoutError
from weight_sync.manifest import build_catalogue
from weight_sync.regions import unite
from weight_sync.sources.megatron import MegatronSource
from weight_sync.sources.megatron_grid import Axis, ParallelGrid
from weight_sync.sources.megatron_layers import vocabulary
from weight_sync.sources.module import ModuleSource

TP_PLAN = {
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "embed": ColwiseParallel(output_layouts=Replicate()),
}


class Net(nn.Module):
    """An embedding of ``rows`` rows (cut by rows under both kinds of parallelism) and an MLP."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Linear(6, rows, bias=False)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(self.norm(self.down(self.up(x))))


def fsdp(rows: int, unshard: bool = False) -> Offer:
    net = filled(Net(rows))
    world = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for part in (net.up, net.down):
        fully_shard(part, mesh=mesh)
    fully_shard(net, mesh=mesh)
    if unshard:
        for part in (net.up, net.down, net):
            part.unshard()
        assert not isinstance(net.up.weight, DTensor)
    return show(net)


def fsdp_by_columns() -> Offer:
    net = filled(Net(4))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(net, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    return show(net)


def tensor_parallel(rows: int) -> Offer:
    net = filled(Net(rows))
    parallelize_module(net, init_device_mesh("cpu", (2,)), TP_PLAN)
    return show(net)


def fsdp_over_tensor_parallel(rows: int) -> Offer:
    net = filled(Net(rows))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(net, mesh["tp"], TP_PLAN)
    fully_shard(net, mesh=mesh["dp"])
    return show(net)


def hybrid() -> Offer:
    net = filled(Net(5))
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    return show(net)


def tied() -> Offer:
    net = filled(Net(6))
    net.head = nn.Linear(6, 6, bias=False)
    net.head.weight = net.embed.weight
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    return show(net)


def after_a_training_step() -> bool:
    net = filled(Net(6))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(net.up, mesh=mesh, reshard_after_forward=False)
    fully_shard(net, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    source = ModuleSource(net)
    manifest = source.manifest(0, "host", "cpu")
    net(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        net(torch.ones(2, 6))  # Leaves the layers gathered, as an evaluation would.
    source.prepare()
    changed = source.region([s.name for s, _ in manifest.regions()].index("up.weight"))
    here = torch.equal(changed, net.up.weight._local_tensor)
    again = source.manifest(0, "host", "cpu")
    moved = not torch.equal(changed, fill("up.weight", 10, 6)[: changed.shape[0]])
    return here and moved and again == manifest


def guarded_gather() -> str:
    mesh = init_device_mesh("cpu", (2,))
    tensor = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
    try:
        with NoCollectives():
            tensor.full_tensor()
    except CollectiveRanError as error:
        return str(error)
    return "nothing was caught"


def partial_sum() -> str:
    mesh = init_device_mesh("cpu", (2,))
    net = nn.Module()
    net.w = nn.Parameter(DTensor.from_local(torch.ones(4, 2), mesh, [Partial()]))
    return _refusal(net)


def wrong_local_shape() -> str:
    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(3, 2)
    net = nn.Module()
    net.w = nn.Parameter(
        DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((8, 2)), stride=(2, 1))
    )
    return _refusal(net)


def sub_mesh() -> list[str]:
    mesh = init_device_mesh("cpu", (2,))  # Ranks 0 and 1 of three.
    net = nn.Module()
    whole = torch.arange(8.0).reshape(4, 2)
    if mesh.get_coordinate() is None:
        local = torch.empty(0)
    else:
        local = whole.chunk(2)[mesh.get_coordinate()[0]]
    net.w = nn.Parameter(
        DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=whole.stride())
    )
    return [s.name for s, _ in ModuleSource(net).manifest(0, "host", "cpu").regions()]


def cut_in_another_order() -> bool:
    """Both mesh dimensions cut dim 0, the inner one first: torch keeps that order in the spec."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(14.0).reshape(7, 2)
    outer, inner = mesh.get_coordinate()
    local = whole.chunk(2)[inner].chunk(2)[outer]
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    spec = DTensorSpec(
        mesh,
        (Shard(0), Shard(0)),
        tensor_meta=meta,
        shard_order=(ShardOrderEntry(0, (1, 0)),),
    )
    net = nn.Module()
    # A buffer: making a Parameter of it would lose the order.
    net.register_buffer("w", DTensor(local, spec, requires_grad=False))
    ((_, box),) = ModuleSource(net).manifest(0, "host", "cpu").regions()
    return torch.equal(whole[box.offset[0] : box.offset[0] + box.size[0]], local)


def padded_vocabulary() -> list[torch.Tensor]:
    """The same rows as a plain shard and as a DTensor whose shape is global already."""
    mesh = init_device_mesh("cpu", (2,))
    grid = ParallelGrid(tp=Axis(2, torch.distributed.get_rank()))
    shared = distribute_tensor(fill("embed", 128, 64), mesh, [Shard(0)])
    shown = []
    for tensor in (shared._local_tensor, shared):
        source = MegatronSource(grid, [vocabulary(tensor, "embed", (100, 64), 128, grid.tp)])
        assert source.manifest(0, "host", "cpu").tensors[0].shape == (100, 64)
        shown.append(source.region(0).clone())
    return shown


def _refusal(net: nn.Module) -> str:
    try:
        ModuleSource(net).manifest(0, "host", "cpu")
    except LayoutError as error:
        return str(error)
    return "accepted"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with source_ranks(str(tmp_path_factory.mktemp("stores"))) as running:
        yield running


def check(offers: list[Offer], rows: int, owners: int = 1) -> None:
    """Every region is the slice of the full tensor it claims, and all of them tile it."""
    for offer in offers:
        assert offer.in_place
        for (spec, box), values in zip(offer.manifest.regions(), offer.values, strict=True):
            whole = fill(spec.alias_of or spec.name, *spec.shape)
            for dim, (start, length) in enumerate(zip(box.offset, box.size, strict=True)):
                whole = whole.narrow(dim, start, length)
            assert torch.equal(values, whole), (spec.name, box)
    catalogue = build_catalogue(offer.manifest for offer in offers)
    united = unite(catalogue, [offer.manifest for offer in offers])
    shapes = {spec.name: spec.shape for spec in catalogue.tensors}
    assert shapes["embed.weight"] == (rows, 6)
    assert set(shapes) >= {"up.weight", "up.bias", "down.weight", "down.bias", "norm.weight"}
    embed = united.tensor == catalogue.index["embed.weight"]
    counts = united.owner_first[1:] - united.owner_first[:-1]
    assert set(counts[embed].tolist()) == {owners}


@pytest.mark.parametrize(("world", "rows"), [(2, 8), (2, 5), (3, 7), (3, 4), (3, 2)])
def test_fsdp_regions_are_the_shards(ranks: Ranks, world: int, rows: int) -> None:
    check(_by_rank(ranks.run(world, fsdp, rows)), rows)


def test_a_rank_with_an_empty_shard_owns_no_region_of_it(ranks: Ranks) -> None:
    offers = ranks.run(3, fsdp, 4)
    owned = [{spec.name for spec, _ in offer.manifest.regions()} for offer in offers]
    assert ["embed.weight" in names for names in owned] == [True, True, False]


def test_gathered_fsdp_layers_are_offered_as_shards_without_communication(ranks: Ranks) -> None:
    check(_by_rank(ranks.run(2, fsdp, 8, True)), 8)


def test_fsdp_shards_by_columns(ranks: Ranks) -> None:
    offers = ranks.run(2, fsdp_by_columns)
    check(_by_rank(offers), 4)
    sizes = {s.name: b.size for s, b in offers[0].manifest.regions()}
    assert sizes["up.weight"] == (10, 3)


@pytest.mark.parametrize("rows", [4, 7])
def test_tensor_parallel_regions_are_the_shards(ranks: Ranks, rows: int) -> None:
    offers = ranks.run(2, tensor_parallel, rows)
    check(_by_rank(offers), rows)
    sizes = {s.name: b.size for s, b in offers[0].manifest.regions()}
    assert sizes["down.weight"] == (6, 5)


@pytest.mark.parametrize("rows", [4, 5, 7, 8])
def test_fsdp_over_tensor_parallel_keeps_rows_in_order(ranks: Ranks, rows: int) -> None:
    check(_by_rank(ranks.run(4, fsdp_over_tensor_parallel, rows)), rows)


def test_hybrid_shards_are_replicas(ranks: Ranks) -> None:
    check(_by_rank(ranks.run(4, hybrid)), 5, owners=2)


def test_a_tied_parameter_is_an_alias_of_its_first_name(ranks: Ranks) -> None:
    offers = ranks.run(2, tied)
    check(_by_rank(offers), 6)
    aliases = {s.name: s.alias_of for s in offers[0].manifest.tensors}
    assert aliases["head.weight"] == "embed.weight"
    assert aliases["embed.weight"] == ""


def test_regions_follow_training_and_evaluation_in_place(ranks: Ranks) -> None:
    assert ranks.run(2, after_a_training_step) == [True, True]


def test_the_collective_guard_catches_a_gather(ranks: Ranks) -> None:
    assert all("all_gather" in caught for caught in ranks.run(2, guarded_gather))


def test_partial_placements_are_refused(ranks: Ranks) -> None:
    for message in ranks.run(2, partial_sum):
        assert "w has placement P(sum)" in message
        assert "redistribute it" in message


def test_a_local_shape_that_contradicts_the_placements_is_refused(ranks: Ranks) -> None:
    for message in ranks.run(2, wrong_local_shape):
        assert "w has local shape (3, 2)" in message
        assert "(4, 2)" in message


def test_a_rank_outside_the_mesh_owns_nothing(ranks: Ranks) -> None:
    assert ranks.run(3, sub_mesh) == [["w"], ["w"], []]


def test_a_declared_cutting_order_is_followed(ranks: Ranks) -> None:
    assert ranks.run(4, cut_in_another_order) == [True] * 4


def test_megatron_vocabularies_may_be_plain_shards_or_global_dtensors(ranks: Ranks) -> None:
    for plain, shared in zip(*ranks.run(2, padded_vocabulary), strict=True):
        whole = torch.cat([plain, shared])
        assert torch.equal(whole, fill("embed", 128, 64)[:100])


def _by_rank(offers: list[Offer]) -> list[Offer]:
    assert [offer.manifest.rank for offer in offers] == list(range(len(offers)))
    return offers
