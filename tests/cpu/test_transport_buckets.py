"""Contract of packing transports: bucket edges, memory bounds, and modules spread over buckets."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.harness.contract import connecting, plain_model
from tests.harness.sources import Held, rows, whole
from tests.harness.standin import StandinModel, Tensors, Unit, copies
from weight_sync.buckets import ALIGN

pytestmark = pytest.mark.timeout(60)

KIB64 = 64 << 10
SIZES = {"ten": 10, "exact": 65_536, "over": 65_537, "embed": 131_072, "big": 200_000}
ORDERS = [
    ("big", "ten", "exact", "over", "embed"),
    ("ten", "exact", "over", "embed", "big"),
    ("exact", "big", "embed", "ten", "over"),
]


def numbered(name: str, version: int) -> torch.Tensor:
    count = torch.arange(SIZES[name]) + 31 * len(name) + 7 * version
    return (count % 251).to(torch.uint8)


@pytest.mark.parametrize("order", ORDERS, ids=["largest first", "largest last", "mixed"])
def test_b35_tensors_around_the_bucket_size_arrive_in_every_order(
    packing: str, order: tuple[str, ...]
) -> None:
    sources = {name: numbered(name, 0) for name in order}
    model = plain_model({n: torch.zeros_like(t) for n, t in sources.items()})
    with connecting(packing) as connect:
        setup = connect([sources], [model], bucket_bytes=KIB64)
        for version in (1, 2):
            for name, tensor in sources.items():
                tensor.copy_(numbered(name, version))
            setup.sync(version)
            for name, tensor in sources.items():
                assert torch.equal(setup.value(name), tensor), name
    assert "bucket 3" in setup.faults[0].seen


@pytest.mark.parametrize("order", ORDERS, ids=["largest first", "largest last", "mixed"])
def test_b35_staging_is_at_most_two_buckets_and_the_largest_tensor(
    monkeypatch: pytest.MonkeyPatch, order: tuple[str, ...]
) -> None:
    from weight_sync.trainer import export, ring

    monkeypatch.setattr(export, "_SPARE_DESCRIPTORS", 1 << 40)
    slots: dict[int, int] = {}
    usual = ring.share_storage

    def counting(nbytes: int, device: torch.device) -> tuple[torch.Tensor, object]:
        memory, handle = usual(nbytes, device)
        slots[memory.data_ptr()] = nbytes
        monkeypatch_finalize(memory, slots)
        peak.append(sum(slots.values()))
        return memory, handle

    peak: list[int] = []
    monkeypatch.setattr(ring, "share_storage", counting)
    sources = {name: numbered(name, 0) for name in order}
    model = plain_model({n: torch.zeros_like(t) for n, t in sources.items()})
    with connecting("ipc-staged") as connect:
        setup = connect([sources], [model], bucket_bytes=KIB64)
        setup.sync(1)
        setup.sync(2)
    largest = -(-max(SIZES.values()) // ALIGN) * ALIGN
    assert 0 < max(peak) <= 2 * KIB64 + largest


def monkeypatch_finalize(memory: torch.Tensor, slots: dict[int, int]) -> None:
    """Forgets a slot when its storage is freed."""
    import weakref

    weakref.finalize(memory.untyped_storage(), slots.pop, memory.data_ptr(), None)


def layered(count: int, width: int) -> StandinModel:
    """``count`` processed layers of three tensors, each ``width`` bytes long."""
    names = ("a", "b", "c")
    units, loaders = [], {}
    for number in range(count):
        unit = f"layer{number}"
        shapes = {n: ((width,), torch.uint8) for n in names}
        units.append(Unit(unit, shapes, post_load=reverse))
        loaders |= {f"{unit}.{n}": [(unit, copies(n))] for n in names}
    zeros = {
        f"layer{i}.{n}": torch.zeros(width, dtype=torch.uint8) for i in range(count) for n in names
    }
    return StandinModel(units, loaders).load(zeros)


def reverse(tensors: Tensors) -> Tensors:
    return {n: t.flip(0) for n, t in tensors.items()}


def spread(count: int, width: int) -> list[dict[str, Held]]:
    """Tensors a and c of each layer on rank 0, b on rank 1; the value names layer and tensor."""
    ranks: list[dict[str, Held]] = [{}, {}]
    for layer, (place, name) in itertools.product(range(count), enumerate("abc")):
        full = torch.full((width,), 10 * layer + place + 1, dtype=torch.uint8)
        key, owner = f"layer{layer}.{name}", place % 2
        ranks[owner][key] = whole(full)
        ranks[1 - owner][key] = rows(full, width, width)
    return ranks


def test_b21_modules_whose_tensors_lie_in_several_buckets_get_their_own_values(
    packing: str,
) -> None:
    width = 1024
    with connecting(packing) as connect:
        setup = connect(spread(6, width), [layered(6, width)], bucket_bytes=width)
        for version in (1, 2, 3):
            setup.shard.models[0].poison()
            setup.sync(version)
            tensors = setup.shard.models[0].tensors()
            for layer, (place, name) in itertools.product(range(6), enumerate("abc")):
                value = tensors[f"layer{layer}.{name}"].unique().tolist()
                assert value == [10 * layer + place + 1]
    assert "bucket 17" in setup.faults[0].seen


def test_b21_few_modules_are_held_open_at_a_time(packing: str) -> None:
    width = 1024
    with connecting(packing) as connect:
        setup = connect(spread(6, width), [layered(6, width)], bucket_bytes=width)
        setup.sync(1)
        held, peak = 0, 0
        for kind, _ in setup.shard.models[0].events:
            held += {"begin": 1, "finish": -1}.get(kind, 0)
            peak = max(peak, held)
    assert peak == 1


def test_b38_a_slow_second_worker_never_reads_the_next_bucket(packing: str) -> None:
    source = {"first": torch.zeros(512), "second": torch.zeros(512)}
    models = [plain_model({n: torch.zeros(512) for n in source}) for _ in range(2)]
    with connecting(packing) as connect:
        setup = connect([source], models, bucket_bytes=2048)
        for version in range(1, 101):
            slow = 0.2 if version <= 2 else 0.002
            setup.faults[1].actions["bucket 0"] = ("sleep", slow)
            source["first"].fill_(version)
            source["second"].fill_(-version)
            setup.sync(version)
            source["first"].fill_(9999)
            for worker in range(2):
                assert setup.value("first", worker).unique().tolist() == [version]
                assert setup.value("second", worker).unique().tolist() == [-version]
    assert setup.faults[0].seen.count("bucket 1") == 100


def test_tensors_of_one_unit_travel_in_one_bucket(packing: str) -> None:
    """A value and its scale; see ``TensorSpec.unit``."""
    full = {n: torch.full((256,), i, dtype=torch.uint8) for i, n in enumerate("wxyz")}
    held = {
        n: Held((256,), "uint8", whole(t).parts, "pair" if n in "wz" else "")
        for n, t in full.items()
    }
    with connecting(packing) as connect:
        setup = connect(
            [held], [plain_model({n: t + 9 for n, t in full.items()})], bucket_bytes=256
        )
        setup.sync(1)
        assert all(torch.equal(setup.value(n), t) for n, t in full.items())
        assert setup.faults[0].seen.count("bucket 2") == 1
        assert "bucket 3" not in setup.faults[0].seen
