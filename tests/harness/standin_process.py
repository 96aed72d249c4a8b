"""A stand-in engine worker in a process of its own, which can be killed at any stage."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tests.harness.dumps import Dump, digest
from tests.harness.faults import Actions, Faults, register_faulty
from tests.harness.processes import process_counts
from tests.harness.shards import ProcessShard
from tests.harness.standin import StandinModel
from weight_sync.transports.ipc import IpcReceiver
from weight_sync.worker.agent import WorkerAgent

FAULTY = "faulty-ipc"
Build = Callable[..., StandinModel]


class StandinWorker:
    """One worker inside its process."""

    def __init__(
        self,
        build: Build,
        args: tuple[object, ...],
        checkpoint: Mapping[str, torch.Tensor],
        rank: int,
        worker: int,
    ) -> None:
        self._model = build(*args).load(checkpoint)
        self._faults = Faults()
        register_faulty(FAULTY, IpcReceiver, {worker: self._faults})
        self._agent = WorkerAgent(self._model, rank, fault=self._faults)

    def rpc(self, request: bytes) -> bytes:
        return self._agent.handle(request)

    def plan_fault(self, actions: Actions) -> None:
        self._faults.actions.update(actions)

    def dump(self) -> Dump:
        return dump(self._model)

    def counts(self) -> tuple[int, int, int]:
        return process_counts()


def dump(model: StandinModel) -> Dump:
    """Digests of all live tensors."""
    return {name: digest(tensor) for name, tensor in model.tensors().items()}


def standin_shard(
    build: Build,
    cfg: object,
    checkpoint: Mapping[str, torch.Tensor],
    tp: int = 1,
    first_worker: int = 0,
) -> ProcessShard:
    """A shard of ``tp`` worker processes that loaded a checkpoint.

    Args:
        build: ``build(cfg, rank, tp)`` gives one worker's model.
        cfg: For ``build``.
        checkpoint: What the workers start from.
        tp: Number of workers.
        first_worker: Dense number of the first one in the fleet.
    """
    register_faulty(FAULTY, IpcReceiver, {})
    args = [(build, (cfg, rank, tp), checkpoint, rank, first_worker + rank) for rank in range(tp)]
    return ProcessShard(StandinWorker, args)
