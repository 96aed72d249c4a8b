"""A trainer rank as a process of its own, with random weights of a named model on its device."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch

from bench.group_limit import send_flat
from bench.models import Config, shapes
from weight_sync.comm.rendezvous import Rendezvous
from weight_sync.messages import TrainerEndpointInfo

if TYPE_CHECKING:
    from bench.checkpoint_engine_trainer import Server


@dataclass(frozen=True)
class BenchTrainer:
    """What every rank builds.

    Attributes:
        cfg: Model configuration.
        devices: Device of each rank, e.g. ``("cuda:1",)``; more than one means FSDP2.
        engine_device: ``"cpu"`` or ``"cuda"``.
    """

    cfg: Config
    devices: tuple[str, ...]
    engine_device: str


def _fill(tensors: dict[str, torch.Tensor], version: int) -> None:
    for i, (name, tensor) in enumerate(tensors.items()):
        generator = torch.Generator(device=tensor.device).manual_seed(1_000_003 * version + i)
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        tensor.normal_(mean, 0.02, generator=generator)


class _Rank:
    """One rank's weights and endpoint."""

    def __init__(self, spec: BenchTrainer, rank: int, port: int) -> None:
        from weight_sync.sources.module import ModuleSource
        from weight_sync.trainer.endpoint import TrainerEndpoint

        device = torch.device(spec.devices[rank])
        self.spec = spec
        self.cuda = device.type == "cuda"
        if device.type == "cuda":
            torch.cuda.set_device(device)
        world = len(spec.devices)
        module = _Holder(
            {n: torch.empty(s, dtype=torch.bfloat16, device=device) for n, s in shapes(spec.cfg)}
        )
        if world > 1:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
            torch.distributed.init_process_group("gloo" if device.type == "cpu" else "nccl")
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            fully_shard(module, mesh=init_device_mesh(device.type, (world,)))
        self.tensors = {
            n: getattr(p, "_local_tensor", p.data) for n, p in module.named_parameters()
        }
        self.module = module
        _fill(self.tensors, 0)
        self.endpoint = TrainerEndpoint(
            ModuleSource(module), rank, engine_device=spec.engine_device
        )
        self.group: object = None
        self.server: Server | None = None
        self.pipe: Connection | None = None

    def publish(self, version: int) -> None:
        """New weights, written in place."""
        _fill(self.tensors, version)
        if self.cuda:
            # Making random weights is no part of a refit.
            torch.cuda.synchronize()
        self.endpoint.publish(version)

    def publish_late(self, version: int) -> None:
        """Publishes while the values are still being made on a side stream (50 ms of work)."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(100_000_000)
            for tensor in self.tensors.values():
                tensor.fill_(float(version))
            self.endpoint.publish(version)

    def overwrite(self, value: float) -> None:
        """Overwrites every weight, as a trainer may once a refit returned."""
        for tensor in self.tensors.values():
            tensor.fill_(value)
        torch.cuda.synchronize()

    def memory(self) -> tuple[int, int, int]:
        """(allocated, reserved, open descriptors) of this process."""
        return (
            torch.cuda.memory_allocated(),
            torch.cuda.memory_reserved(),
            len(os.listdir("/proc/self/fd")),
        )

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Host copies of the rank's local tensors, to write a checkpoint of them."""
        return {n: t.detach().cpu().clone() for n, t in self.tensors.items()}

    def send_flat(self, rendezvous: Rendezvous, nbytes: int, count: int) -> None:
        """Sends plain buffers to the benchmark, for the rate that the group allows."""
        ranks = len(self.spec.devices)
        device = torch.device(self.spec.devices[self.endpoint.rank])
        send_flat(rendezvous, self.endpoint.rank, ranks, device, nbytes, count)

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

    def join(self, address: str, port: int) -> None:
        """Joins vLLM's own NCCL group as its trainer."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self.group = NCCLWeightTransferEngine.trainer_init(
            {"master_address": address, "master_port": port, "world_size": 2}
        )

    def send(self, packed: bool) -> None:
        """Sends everything through vLLM's own NCCL engine."""
        from vllm.distributed.weight_transfer.nccl_engine import (
            NCCLTrainerSendWeightsArgs,
            NCCLWeightTransferEngine,
        )

        NCCLWeightTransferEngine.trainer_send_weights(
            iter(self.tensors.items()), NCCLTrainerSendWeightsArgs(group=self.group, packed=packed)
        )
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
    pipe.send(state.endpoint.info)
    while True:
        command, *args = pipe.recv()
        if command == "stop":
            state.endpoint.close()
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
