"""One model of ``vllm_layers`` in a worker process and its trainer in the test process."""

from __future__ import annotations

import torch

from tests.harness.local import LocalTrainers
from tests.harness.shards import ProcessShard
from tests.harness.sources import BoxSource, whole
from weight_sync.sources.base import WeightSource
from weight_sync.synchronizer import WeightSynchronizer

Checkpoint = dict[str, torch.Tensor]


def worker(kind: str, checkpoint: Checkpoint) -> object:
    """Imported in the child only: vLLM must not be loaded where tests run."""
    from tests.harness.vllm_layers import LayersWorker

    return LayersWorker(kind, checkpoint)


class LayerCase:
    """One layer model in a worker process and a trainer in this process."""

    def __init__(
        self,
        kind: str,
        names: dict[str, tuple[int, ...]],
        *,
        source: WeightSource | None = None,
        **options: object,
    ) -> None:
        self._shapes = names
        self._held = self.checkpoint(0)
        self.shard = ProcessShard(worker, [(kind, self.checkpoint(0))], vllm=True)
        held = BoxSource({n: whole(t) for n, t in self._held.items()})
        self.trainers = LocalTrainers([held if source is None else source])
        self.synchronizer = WeightSynchronizer(
            self.trainers.infos,
            [self.shard],
            deadline_s=20,
            **options,  # type: ignore[arg-type]
        )
        self._version = 0

    def checkpoint(self, seed: int) -> Checkpoint:
        source = torch.Generator().manual_seed(seed)
        return {n: torch.randn(shape, generator=source) for n, shape in self._shapes.items()}

    def sync(self, seed: int) -> None:
        for name, tensor in self.checkpoint(seed).items():
            self._held[name].copy_(tensor)
        self._version += 1
        self.trainers.publish(self._version)
        self.synchronizer.sync_weights(self._version)

    def ask(self, method: str, *args: object) -> object:
        return self.shard.ask(method, *args)[0]

    def expect_fresh(self, seed: int) -> None:
        assert self.ask("dump") == self.ask("fresh", self.checkpoint(seed))

    def __enter__(self) -> LayerCase:
        return self

    def __exit__(self, *exc: object) -> None:
        self.synchronizer.shutdown()
        self.trainers.close()
        self.shard.close()
