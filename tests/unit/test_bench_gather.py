"""Whole tensors on rank 0, put together from real processes over gloo."""

from __future__ import annotations

import os

import pytest
import torch

from bench.gather import Gatherer
from bench.grids import trainer_grid
from bench.megatron_rank import entries
from bench.models import config, shapes
from bench.values import fill, whole
from tests.harness.processes import Child
from tests.harness.trainers import free_port
from weight_sync.sources.megatron import MegatronSource


class Rank:
    """One rank of a grid, inside its process."""

    def __init__(self, model: str, text: str, rank: int, port: int) -> None:
        self._cfg = config(model)
        grid = trainer_grid(text, self._cfg)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(grid.ranks))
        torch.distributed.init_process_group("gloo")
        place, cpu = grid.place(rank), torch.device("cpu")
        source = MegatronSource(place, entries(self._cfg, place, cpu))
        manifest = source.manifest(rank, "host", "cpu")
        for number, (spec, box) in enumerate(manifest.regions()):
            fill(source.region(number), spec.name, spec.shape, box.offset, 1)
        self._gatherer = Gatherer(source, manifest, grid.ranks, list(shapes(self._cfg)), cpu)

    def wrong(self) -> tuple[int, list[str]]:
        """How many tensors came, and which of them are not what they should be."""
        want = whole(self._cfg, 1)
        got = dict(self._gatherer.tensors())
        return len(got), [n for n, tensor in got.items() if not torch.equal(tensor, want[n])]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("model", "text"), [("tiny", "pp=2,tp=2"), ("tiny-moe", "pp=2,ep=2")])
def test_rank_0_gets_every_tensor_whole(model: str, text: str) -> None:
    port = free_port()
    ranks = [Child(Rank, model, text, rank, port) for rank in range(4)]
    try:
        for rank in ranks:
            rank.ready()
        for _ in range(2):
            for rank in ranks:
                rank.send("wrong")
            first, *others = [rank.receive() for rank in ranks]
            assert first == (len(list(shapes(config(model)))), [])
            assert others == [(0, [])] * 3
    finally:
        for rank in ranks:
            rank.close()
