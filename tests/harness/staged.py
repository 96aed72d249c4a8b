"""Trainers and one shard in this process, connected through groups, with hooks on both sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tests.harness.contract import plain_model
from tests.harness.local import LocalShard
from tests.harness.sources import BoxSource, Held, whole
from tests.harness.standin import StandinModel
from weight_sync.synchronizer import WeightSynchronizer
from weight_sync.trainer.endpoint import TrainerEndpoint
from weight_sync.transports.staging import StagedReceiver

Weights = Mapping[str, Held | torch.Tensor]


@dataclass
class Hook:
    """Remembers every call; does what the test set for a stage, once.

    Attributes:
        seen: Stage and offset of every call.
        then: Stage -> smallest offset at which to act, and what to do.
    """

    seen: list[tuple[str, int]] = field(default_factory=list)
    then: dict[str, tuple[int, Callable[[], None]]] = field(default_factory=dict)

    def __call__(self, stage: str, offset: int = 0) -> None:
        self.seen.append((stage, offset))
        at, action = self.then.get(stage, (0, None))
        if action is not None and offset >= at:
            del self.then[stage]
            action()

    def at(self, stage: str, action: Callable[[], None], offset: int = 0) -> None:
        """Acts when ``stage`` begins, or in it as soon as ``offset`` bytes are launched."""
        self.then[stage] = (offset, action)


@dataclass
class Staged:
    """What one test drives."""

    endpoints: list[TrainerEndpoint]
    trainer_hooks: list[Hook]
    shard: LocalShard
    worker_hooks: list[Hook]
    synchronizer: WeightSynchronizer

    def sync(self, version: int, **options: object) -> object:
        """Publishes on all ranks and refits."""
        for endpoint in self.endpoints:
            endpoint.publish(version)
        return self.synchronizer.sync_weights(version, **options)  # type: ignore[arg-type]

    def value(self, name: str, worker: int = 0) -> torch.Tensor:
        """A live tensor of a worker."""
        return self.shard.models[worker].tensors()[f"{name}.weight"]  # type: ignore[attr-defined]

    def receiver(self, worker: int = 0) -> StagedReceiver:
        """The transport of a worker."""
        session = self.shard.agents[worker]._session
        assert session is not None
        assert isinstance(session.transport, StagedReceiver)
        return session.transport


@contextmanager
def staged(
    transport: str,
    ranks: Sequence[Weights],
    models: Sequence[StandinModel],
    **options: object,
) -> Iterator[Staged]:
    """Builds everything and closes it afterwards.

    Args:
        transport: ``"broadcast"`` or ``"reshard"``.
        ranks: What each trainer rank holds.
        models: One stand-in per worker.
        options: Passed to the synchronizer.
    """
    sources = [
        BoxSource({n: h if isinstance(h, Held) else whole(h) for n, h in held.items()})
        for held in ranks
    ]
    trainer_hooks = [Hook() for _ in sources]
    worker_hooks = [Hook() for _ in models]
    endpoints = [
        TrainerEndpoint(source, rank, fault=hook)
        for rank, (source, hook) in enumerate(zip(sources, trainer_hooks, strict=True))
    ]
    shard = LocalShard(models, worker_hooks)  # type: ignore[arg-type]
    synchronizer = WeightSynchronizer(
        [e.info for e in endpoints],
        [shard],
        transport=transport,
        **{"deadline_s": 20.0, **options},  # type: ignore[arg-type]
    )
    try:
        yield Staged(endpoints, trainer_hooks, shard, worker_hooks, synchronizer)
    finally:
        synchronizer.shutdown()
        for endpoint in endpoints:
            endpoint.close()


def blank(weights: Mapping[str, torch.Tensor]) -> StandinModel:
    """A stand-in that wants these tensors and holds zeros."""
    return plain_model({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
