"""The transports that the contract suite runs, and one call that refits stand-ins through them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from tests.harness.faults import Faults, register_faulty
from tests.harness.local import HUB, LocalShard, LocalTrainers
from tests.harness.sources import BoxSource, Held, whole
from tests.harness.standin import StandinModel, Unit, copies
from weight_sync.synchronizer import WeightSynchronizer
from weight_sync.trainer import export
from weight_sync.transports.ipc import IpcReceiver
from weight_sync.transports.registry import GROUPED, Factory

FACTORIES: dict[str, Factory] = {
    "memory": HUB.receiver,
    "ipc": IpcReceiver,
    "ipc-staged": IpcReceiver,
}
# Those of the library's own that take part as they are: they have hooks of their own.
NAMES = (*FACTORIES, *GROUPED)
# Those that pack what they send into buckets.
PACKING = ("memory", "ipc-staged")


def prepare(name: str, patch: pytest.MonkeyPatch) -> None:
    """Sets up what one transport needs in this process."""
    if name == "ipc-staged":
        # As with a descriptor limit that leaves no room to export storages one by one.
        patch.setattr(export, "_SPARE_DESCRIPTORS", 1 << 40)


def plain_model(tensors: Mapping[str, torch.Tensor]) -> StandinModel:
    """One direct unit per tensor, holding the tensors' values."""
    units = [Unit(name, {"weight": (tuple(t.shape), t.dtype)}) for name, t in tensors.items()]
    model = StandinModel(units, {name: [(name, copies("weight"))] for name in tensors})
    return model.load(tensors)


@dataclass
class Setup:
    """Trainers and one shard, connected by a transport under test.

    Attributes:
        trainers: Endpoints of this process.
        shard: The shard.
        faults: Hooks per worker, also called by the transport.
        synchronizer: What the test drives.
    """

    trainers: LocalTrainers
    shard: LocalShard
    faults: list[Faults]
    synchronizer: WeightSynchronizer

    def sync(self, version: int, **options: object) -> None:
        """Publishes and refits."""
        self.trainers.publish(version)
        self.synchronizer.sync_weights(version, **options)  # type: ignore[arg-type]

    def value(self, name: str, worker: int = 0) -> torch.Tensor:
        """A live tensor of a worker."""
        return self.shard.models[worker].tensors()[f"{name}.weight"]  # type: ignore[attr-defined]


Connect = Callable[..., Setup]


@contextmanager
def connecting(transport: str):
    """Gives a function that builds a :class:`Setup`; everything is closed afterwards."""
    made: list[Setup] = []

    def connect(
        sources: Sequence[Mapping[str, Held | torch.Tensor]],
        models: Sequence[StandinModel],
        *,
        bucket_bytes: int = 1 << 20,
        deadline_s: float = 10.0,
        not_trained: Sequence[str] = (),
    ) -> Setup:
        faults = [Faults() for _ in models]
        name = transport
        if transport not in GROUPED:
            name = "under-test"
            register_faulty(name, FACTORIES[transport], dict(enumerate(faults)))
        held = [
            {n: h if isinstance(h, Held) else whole(h) for n, h in source.items()}
            for source in sources
        ]
        trainers = LocalTrainers([BoxSource(h) for h in held])
        shard = LocalShard(models, faults)
        synchronizer = WeightSynchronizer(
            trainers.infos,
            [shard],
            transport=name,
            bucket_bytes=bucket_bytes,
            deadline_s=deadline_s,
            not_trained=not_trained,
        )
        made.append(Setup(trainers, shard, faults, synchronizer))
        return made[-1]

    try:
        yield connect
    finally:
        for setup in made:
            setup.synchronizer.shutdown()
            setup.trainers.close()
