"""Random trainer and engine layouts through broadcast and reshard, against a golden copy."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness.sources import Held
from tests.harness.staged import staged
from tests.harness.standin import StandinModel, Unit, copies, takes
from weight_sync.layout import Box, Shard, full_box, shard_box
from weight_sync.transports.registry import GROUPED

pytestmark = pytest.mark.timeout(240)

DTYPES = (torch.uint8, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Tensor:
    """One tensor and how both sides cut it; -1 for not at all."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainer_dim: int
    engine_dim: int

    def values(self, number: int, version: int) -> torch.Tensor:
        """Different in neighbouring places, tensors and versions; exact in every dtype."""
        count = torch.arange(torch.Size(self.shape).numel())
        return ((count + 37 * number + 101 * version) % 251).to(self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class Case:
    """Both sides."""

    tensors: tuple[Tensor, ...]
    trainers: int
    tp: int
    shards: int
    bucket_bytes: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tp = draw(st.integers(1, 2))
    tensors = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(tp * n for n in draw(st.lists(st.integers(1, 24), min_size=1, max_size=3)))
        dims = st.integers(-1, len(shape) - 1)
        tensors.append(Tensor(shape, draw(st.sampled_from(DTYPES)), draw(dims), draw(dims)))
    return Case(
        tuple(tensors),
        trainers=draw(st.integers(1, 3)),
        tp=tp,
        shards=draw(st.integers(1, 2)),
        bucket_bytes=draw(st.sampled_from([1, 512, 4096, 1 << 20])),
    )


def held(case: Case, number: int, rank: int, version: int) -> Held:
    tensor = case.tensors[number]
    full = tensor.values(number, version)
    box: Box = full_box(tensor.shape)
    if tensor.trainer_dim >= 0:
        box = shard_box(tensor.shape, [case.trainers], [Shard(tensor.trainer_dim)], [rank])
    at = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
    name = str(tensor.dtype).removeprefix("torch.")
    return Held(tensor.shape, name, [(box, full[at].clone())] if box.elements else [])


def engine(case: Case, rank: int, version: int) -> StandinModel:
    """A worker that loaded a version from a checkpoint: the golden copy."""
    units, loaders = [], {}
    for number, tensor in enumerate(case.tensors):
        dim, shape = tensor.engine_dim, list(tensor.shape)
        loader = copies("weight")
        if dim >= 0:
            shape[dim] //= case.tp
            loader = takes("weight", dim, rank, case.tp)
        units.append(Unit(f"t{number}", {"weight": (tuple(shape), tensor.dtype)}))
        loaders[f"t{number}"] = [(f"t{number}", loader)]
    full = {f"t{n}": t.values(n, version) for n, t in enumerate(case.tensors)}
    return StandinModel(units, loaders).load(full)


@pytest.mark.parametrize("transport", GROUPED)
@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    derandomize=True,
)
@given(case=cases())
def test_every_element_arrives_in_its_place(transport: str, case: Case) -> None:
    ranks = [
        {f"t{n}": held(case, n, rank, 1) for n in range(len(case.tensors))}
        for rank in range(case.trainers)
    ]
    workers = [(rank, engine(case, rank, 0)) for _ in range(case.shards) for rank in range(case.tp)]
    for _, worker in workers:
        worker.poison()
    # One process plays all workers of all shards as one shard: the plan sees no difference.
    with staged(transport, ranks, [w for _, w in workers], bucket_bytes=case.bucket_bytes) as setup:
        setup.sync(1)
        for rank, worker in workers:
            want = engine(case, rank, 1).tensors()
            have = worker.tensors()
            assert all(torch.equal(have[n], t) for n, t in want.items())
