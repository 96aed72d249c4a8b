"""Real gloo processes that hold a sharded module and show what its ``ModuleSource`` offers."""

from __future__ import annotations

import multiprocessing
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from weight_sync.manifest import Manifest
from weight_sync.sources.module import ModuleSource

PATIENCE = 60.0


class Offer(NamedTuple):
    """What one rank showed: its manifest, and a copy of every region."""

    manifest: Manifest
    values: list[torch.Tensor]
    in_place: bool


class CollectiveRanError(AssertionError):
    """A collective ran while weights were only to be shown."""


class NoCollectives(TorchDispatchMode):
    """Fails on every collective, whoever starts it: each passes the dispatcher."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise CollectiveRanError(str(func))
        return func(*args, **(kwargs or {}))


def fill(name: str, *shape: int) -> torch.Tensor:
    """Element k is ``(crc32(name) + k) mod 251``: exact in bf16, distinct in every place."""
    count = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return ((zlib.crc32(name.encode()) + count) % 251).to(torch.float32).reshape(shape)


def filled(module: torch.nn.Module) -> torch.nn.Module:
    """Gives every parameter the fill of its name."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(fill(name, *parameter.shape))
    return module


def show(module: torch.nn.Module) -> Offer:
    """What this rank's source offers; no collective, gather or redistribution may run."""
    source = ModuleSource(module)
    forbidden = CollectiveRanError("a DTensor was gathered or redistributed")
    with (
        NoCollectives(),
        patch.object(DTensor, "full_tensor", side_effect=forbidden),
        patch.object(DTensor, "redistribute", side_effect=forbidden),
    ):
        manifest = source.manifest(dist.get_rank() if dist.is_initialized() else 0, "host", "cpu")
        regions = [source.region(i) for i in range(len(manifest.regions()))]
    storages = {
        (p.to_local() if hasattr(p, "to_local") else p).untyped_storage().data_ptr()
        for p in module.parameters()
    }
    in_place = all(r.untyped_storage().data_ptr() in storages for r in regions)
    return Offer(manifest, [r.clone() for r in regions], in_place)


class Ranks:
    """Four processes, kept between tests; each test joins as many of them as it needs."""

    def __init__(self, folder: str) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.fsdp"])
        self._folder, self._groups = folder, 0
        self._ranks: list[tuple[Any, Connection]] = []
        for _ in range(4):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._ranks.append((process, ours))

    def run(self, world: int, body: Callable[..., Any], *args: object) -> list[Any]:
        """Runs ``body(*args)`` on ``world`` ranks of one gloo group; returns results by rank."""
        self._groups += 1
        for rank in range(world):
            job = (rank, world, f"{self._folder}/store{self._groups}", body, args)
            self._ranks[rank][1].send(job)
        results = []
        for rank in range(world):
            assert self._ranks[rank][1].poll(PATIENCE), f"rank {rank} is busy after {PATIENCE} s"
            kind, value = self._ranks[rank][1].recv()
            results.append((kind, value))
        failed = [f"rank {r}: {v}" for r, (kind, v) in enumerate(results) if kind != "ok"]
        assert not failed, "\n".join(failed)
        return [value for _, value in results]

    def close(self) -> None:
        """Ends all processes."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()


@contextmanager
def source_ranks(folder: str) -> Iterator[Ranks]:
    """Rank processes that are gone afterwards."""
    ranks = Ranks(folder)
    try:
        yield ranks
    finally:
        ranks.close()


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            rank, world, store, body, args = connection.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=PATIENCE / 2),
            )
            answer = ("ok", body(*args))
        except Exception:
            answer = ("error", traceback.format_exc())
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send(answer)
