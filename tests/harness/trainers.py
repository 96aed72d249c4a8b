"""Trainer ranks as processes of their own, driven over pipes by a test.

Each rank builds its parameters from a named layout, fills them with the weights of a version and serves
them through a real ``TrainerEndpoint``.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from bench.models import Config, random_weights

LAYOUTS = ("plain", "fsdp", "tp", "fsdp_tp", "replicas")


@dataclass(frozen=True)
class TrainerSpec:
    """What every rank builds.

    Attributes:
        cfg: Model configuration.
        layout: One of ``LAYOUTS``.
        ranks: Number of ranks.
        dtype: Local dtype; ``cast`` makes bf16 of it on the wire.
        cast: Passed to ``ModuleSource``.
        tie: Offer ``lm_head.weight`` as the same parameter as the embedding.
        weights: Makes the weights of a version; random ones by seed if None.
        endpoint: Further arguments of ``TrainerEndpoint``.
    """

    cfg: Config
    layout: str = "plain"
    ranks: int = 1
    dtype: torch.dtype = torch.bfloat16
    cast: dict[str, str] = field(default_factory=dict)
    tie: bool = False
    weights: Callable[[Config, int], dict[str, torch.Tensor]] | None = None
    endpoint: dict[str, object] = field(default_factory=dict)


def weights_of(spec: TrainerSpec, version: int) -> dict[str, torch.Tensor]:
    """Full weights of a version, in bf16."""
    if spec.weights is not None:
        return spec.weights(spec.cfg, version)
    return random_weights(spec.cfg, 1000 + version)


class Holder(torch.nn.Module):
    """Parameters under checkpoint names, nested as modules so that FSDP2 can shard them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(leaf, torch.nn.Parameter(tensor))


def build_module(spec: TrainerSpec, rank: int) -> Holder:
    """The rank's module, holding version 0."""
    full = {n: t.to(spec.dtype) for n, t in weights_of(spec, 0).items()}
    module = Holder(full)
    if spec.tie:
        module.add_module("lm_head", torch.nn.Module())
        module.lm_head.register_parameter("weight", module.model.embed_tokens.weight)
    if spec.layout in ("plain", "replicas"):
        return module
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    if spec.layout == "fsdp":
        fully_shard(module, mesh=init_device_mesh("cpu", (spec.ranks,)))
        return module
    tp = spec.ranks if spec.layout == "tp" else 2
    mesh = init_device_mesh("cpu", (spec.ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    done: dict[int, torch.nn.Parameter] = {}
    for sub in module.modules():
        for key, parameter in list(sub._parameters.items()):
            if id(parameter) not in done:
                dim = 1 if parameter.dim() > 1 and key == "weight" and parameter.shape[1] % 2 == 0 else 0
                done[id(parameter)] = torch.nn.Parameter(
                    distribute_tensor(parameter.data, mesh["tp"], [Shard(dim if rank >= 0 else 0)])
                )
            sub.register_parameter(key, done[id(parameter)])
    if spec.layout == "fsdp_tp":
        fully_shard(module, mesh=mesh["dp"])
    return module


def load(module: Holder, spec: TrainerSpec, version: int) -> None:
    """Writes a version in place, shard by shard, without gathering."""
    from torch.distributed.tensor import DTensor

    from weight_sync.sources.dtensor import region_of

    full = weights_of(spec, version)
    for name, parameter in module.named_parameters():
        target = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        box = region_of(name, parameter)
        if box is None or not target.numel():
            continue
        at = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        target.copy_(full[name].to(spec.dtype)[at] if at else full[name].to(spec.dtype))


def _serve(spec: TrainerSpec, rank: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    from weight_sync.sources.module import ModuleSource
    from weight_sync.trainer.endpoint import TrainerEndpoint

    if spec.layout in ("fsdp", "tp", "fsdp_tp"):
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(spec.ranks)
        )
        torch.distributed.init_process_group("gloo")
    module = build_module(spec, rank)
    endpoint = TrainerEndpoint(ModuleSource(module, cast=spec.cast), rank, **spec.endpoint)
    pipe.send(endpoint.info)
    while True:
        command, *args = pipe.recv()
        try:
            match command:
                case "publish":
                    load(module, spec, args[0])
                    endpoint.publish(args[0])
                    pipe.send(None)
                case "wait":
                    endpoint.wait(args[0], args[1])
                    pipe.send(None)
                case "counts":
                    pipe.send(process_counts())
                case "call":
                    pipe.send(args[0](module, endpoint, *args[1:]))
                case "stop":
                    endpoint.close()
                    pipe.send(None)
                    return
        except Exception as error:  # The test looks at it.
            pipe.send(error)


def process_counts() -> tuple[int, int, int]:
    """(open descriptors, threads, resident KiB) of this process."""
    import threading

    import psutil

    resident = psutil.Process().memory_info().rss // 1024
    return len(os.listdir("/proc/self/fd")), threading.active_count(), resident


class Trainers:
    """Trainer ranks as child processes; a context manager that always ends them."""

    def __init__(self, spec: TrainerSpec) -> None:
        import socket

        self.spec = spec
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        context = multiprocessing.get_context("spawn")
        self.processes = []
        self.pipes: list[Connection] = []
        for rank in range(spec.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(spec, rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        self.infos = [self._receive(pipe, 60) for pipe in self.pipes]

    @staticmethod
    def _receive(pipe: Connection, seconds: float) -> object:
        if not pipe.poll(seconds):
            raise TimeoutError("a trainer process did not answer")
        answer = pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def send(self, *command: object, ranks: Sequence[int] | None = None) -> None:
        for rank in range(len(self.pipes)) if ranks is None else ranks:
            self.pipes[rank].send(command)

    def receive(self, seconds: float = 60, ranks: Sequence[int] | None = None) -> list[object]:
        chosen = range(len(self.pipes)) if ranks is None else ranks
        return [self._receive(self.pipes[rank], seconds) for rank in chosen]

    def ask(self, *command: object, seconds: float = 60) -> list[object]:
        """Sends a command to all ranks and returns their answers; errors are raised."""
        self.send(*command)
        return self.receive(seconds)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        for pipe in self.pipes:
            pipe.close()

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
