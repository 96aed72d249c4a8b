"""Trainer ranks and stand-in engine shards in the test process: real protocol, no start-up."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.harness.faults import Faults
from weight_sync.sources.base import WeightSource
from weight_sync.trainer.endpoint import TrainerEndpoint
from weight_sync.transports.memory import MemoryHub
from weight_sync.transports.registry import register_transport
from weight_sync.worker.agent import WorkerAgent
from weight_sync.worker.model import EngineModel

HUB = MemoryHub()
register_transport("memory", HUB.receiver)


class LocalTrainers:
    """Endpoints of this process, one per source."""

    def __init__(self, sources: Sequence[WeightSource]) -> None:
        self.endpoints = [TrainerEndpoint(s, rank) for rank, s in enumerate(sources)]
        self.infos = [endpoint.info for endpoint in self.endpoints]
        for info, source in zip(self.infos, sources, strict=True):
            HUB.offer(info, source)

    def publish(self, version: int) -> None:
        for endpoint in self.endpoints:
            endpoint.publish(version)

    def close(self) -> None:
        for endpoint in self.endpoints:
            endpoint.close()

    def __enter__(self) -> LocalTrainers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class LocalShard:
    """An ``EngineShard`` whose workers are agents of this process, each on a thread of its own.

    Args:
        models: One per worker.
        faults: One hook per worker, if any.
    """

    def __init__(self, models: Sequence[EngineModel], faults: Sequence[Faults] = ()) -> None:
        hooks = faults or [Faults() for _ in models]
        self.models = list(models)
        self.agents = [
            WorkerAgent(model, rank, fault=hook)
            for rank, (model, hook) in enumerate(zip(models, hooks, strict=True))
        ]
        self.workers = len(self.agents)
        self.log: list[str] = []
        self._pool = ThreadPoolExecutor(self.workers, thread_name_prefix="stand-in")

    def call(self, request: bytes) -> list[bytes]:
        return list(self._pool.map(lambda agent: agent.handle(request), self.agents))

    def pause(self) -> None:
        self.log.append("pause")

    def invalidate(self) -> None:
        self.log.append("invalidate")

    def resume(self) -> None:
        self.log.append("resume")

    def set_version(self, version: int) -> None:
        self.log.append(f"version {version}")
