"""Trainer ranks as processes of their own, with made-up weights of a named model."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch

from bench.gather import Gatherer
from bench.grids import TrainerGrid
from bench.megatron_rank import entries
from bench.models import Config, shapes
from bench.values import change, fill
from weight_sync.identity import host_identity
from weight_sync.messages import TrainerEndpointInfo
from weight_sync.sources.base import WeightSource
from weight_sync.sources.megatron import MegatronSource
from weight_sync.sources.module import ModuleSource

if TYPE_CHECKING:
    from bench.checkpoint_engine_trainer import Server


@dataclass(frozen=True)
class BenchTrainer:
    """What every rank builds.

    Attributes:
        cfg: Model configuration.
        devices: Device of each rank, e.g. ``("cuda:1",)``.
        engine_device: ``"cpu"`` or ``"cuda"``.
        grid: How ranks share the weights.
    """

    cfg: Config
    devices: tuple[str, ...]
    engine_device: str
    grid: TrainerGrid = field(default_factory=TrainerGrid)


class _Rank:
    """One rank's weights and endpoints."""

    def __init__(self, spec: BenchTrainer, rank: int, port: int) -> None:
        from weight_sync.trainer.endpoint import TrainerEndpoint

        self.spec, self.rank = spec, rank
        self.device = torch.device(spec.devices[rank])
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if spec.grid.ranks > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(spec.grid.ranks))
            torch.distributed.init_process_group("gloo" if self.device.type == "cpu" else "nccl")
        self.tensors: dict[str, torch.Tensor] = {}
        self.source = self._source()
        self.endpoints = [TrainerEndpoint(self.source, rank, engine_device=spec.engine_device)]
        self.manifest = self.source.manifest(rank, host_identity(), str(self.device))
        self.regions = self.manifest.regions()
        self.gatherer: Gatherer | None = None
        self.group: object = None
        self.server: Server | None = None
        self.pipe: Connection | None = None
        self._values = 0
        for number, (owned, box) in enumerate(self.regions):
            fill(self.source.region(number), owned.name, owned.shape, box.offset, self._values)

    def _source(self) -> WeightSource:
        spec = self.spec
        if spec.grid.megatron:
            place = spec.grid.place(self.rank)
            return MegatronSource(place, entries(spec.cfg, place, self.device))
        module = _Holder(
            {
                n: torch.empty(s, dtype=torch.bfloat16, device=self.device)
                for n, s in shapes(spec.cfg)
            }
        )
        if spec.grid.fsdp > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(module, mesh=init_device_mesh(self.device.type, (spec.grid.fsdp,)))
        else:
            self.tensors = {n: p.data for n, p in module.named_parameters()}
        return ModuleSource(module)

    def _change(self, values: int) -> None:
        versions = self._values, values
        for number, (spec, box) in enumerate(self.regions):
            change(self.source.region(number), spec.name, spec.shape, box.offset, versions)
        self._values = values
        if self.device.type == "cuda":
            # Making weights is no part of a refit.
            torch.cuda.synchronize()

    def info(self) -> TrainerEndpointInfo:
        """The rank as one of all ranks."""
        return self.endpoints[0].info

    def publish(self, version: int, values: int | None = None) -> None:
        """New weights, written in place: those of ``values``, or else of the version."""
        self._change(version if values is None else values)
        for endpoint in self.endpoints:
            endpoint.publish(version)

    def open_stage(self) -> TrainerEndpointInfo:
        """One more endpoint, as a rank of this pipeline stage alone."""
        from weight_sync.trainer.endpoint import TrainerEndpoint

        (stage,) = (ranks for ranks in self.spec.grid.stages() if self.rank in ranks)
        alone = TrainerEndpoint(
            self.source, stage.index(self.rank), engine_device=self.spec.engine_device
        )
        self.endpoints.append(alone)
        return alone.info

    def update_by_checkpoint_engine(self) -> None:
        """One refit by checkpoint-engine; sends its socket paths as an answer of their own."""
        from bench.checkpoint_engine_trainer import Server

        if self.server is None:
            self.server = Server()
        assert self.pipe is not None
        self.server.update(self.tensors, self.pipe.send)

    def ipc_handles(self) -> dict[str, object]:
        """What vLLM's own ipc engine needs, made as its trainer side makes it."""
        from torch.multiprocessing.reductions import reduce_tensor

        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        torch.cuda.current_stream().synchronize()
        return {
            "names": list(self.tensors),
            "dtype_names": ["bfloat16"] * len(self.tensors),
            "shapes": [list(t.shape) for t in self.tensors.values()],
            "ipc_handles": [{uuid: reduce_tensor(t)[1]} for t in self.tensors.values()],
        }

    def _gathered(self) -> Gatherer:
        if self.gatherer is None:
            self.gatherer = Gatherer(
                self.source,
                self.manifest,
                self.spec.grid.ranks,
                list(shapes(self.spec.cfg)),
                self.device,
            )
        return self.gatherer

    def join(self, address: str, port: int, world: int) -> None:
        """Joins vLLM's own NCCL group as its trainer, which is rank 0."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self._gathered()
        if self.rank == 0:
            self.group = NCCLWeightTransferEngine.trainer_init(
                {"master_address": address, "master_port": port, "world_size": world}
            )

    def send(self, packed: bool) -> None:
        """Sends everything through vLLM's own NCCL engine."""
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerSendWeightsArgs,
            NCCLWeightTransferEngine,
        )

        tensors = self._gathered().tensors()
        if self.rank == 0:
            NCCLWeightTransferEngine.trainer_send_weights(
                tensors, NCCLTrainerSendWeightsArgs(group=self.group, packed=packed)
            )
        else:
            for _ in tensors:
                raise AssertionError("only rank 0 gets whole tensors")
        torch.cuda.synchronize()


class _Holder(torch.nn.Module):
    """Parameters under checkpoint names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))


def _serve(spec: BenchTrainer, rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    state = _Rank(spec, rank, port)
    state.pipe = pipe
    pipe.send(state.info())
    while True:
        try:
            command, *args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(getattr(state, command)(*args))
        except Exception as error:  # Raised again on the benchmark's side.
            pipe.send(error)


class TrainerProcesses:
    """All trainer ranks; a context manager that always ends them."""

    def __init__(self, spec: BenchTrainer) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._pipes: list[Connection] = []
        for rank in range(len(spec.devices)):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(spec, rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        self.infos: list[TrainerEndpointInfo] = [
            info for info in self._answers(300) if isinstance(info, TrainerEndpointInfo)
        ]

    def _answers(self, seconds: float) -> Iterator[object]:
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(seconds):
                raise TimeoutError(f"trainer rank {rank} did not answer within {seconds} s")
            answer = pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def post(self, *command: object) -> None:
        """Sends a command to all ranks without waiting."""
        for pipe in self._pipes:
            pipe.send(command)

    def collect(self, seconds: float = 120) -> list[object]:
        """Answers to the last command."""
        return list(self._answers(seconds))

    def ask(self, *command: object, seconds: float = 120) -> list[object]:
        """Sends a command and waits for the answers."""
        self.post(*command)
        return self.collect(seconds)

    def __enter__(self) -> TrainerProcesses:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
