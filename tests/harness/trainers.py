"""Trainer ranks as processes of their own.

Each rank builds its parameters in a named layout, fills them with the weights of a version and
serves them through a real ``TrainerEndpoint``.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from bench.models import Config, random_weights
from tests.harness.processes import Child, process_counts
from weight_sync.messages import TrainerEndpointInfo

LAYOUTS = ("plain", "fsdp", "tp", "fsdp_tp")
Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TrainerSpec:
    """What every rank builds.

    Attributes:
        cfg: Model configuration, for ``weights``.
        layout: One of ``LAYOUTS``; ``plain`` on several ranks means replicas.
        ranks: Number of ranks.
        dtype: Local dtype; ``cast`` says what is made of it on the wire.
        cast: Passed to ``ModuleSource``.
        tie: Offer ``lm_head.weight`` as the same parameter as the embedding.
        tp_dim: Dimension that tensor parallel layouts cut matrices along.
        weights: Makes the weights of a version; random ones by seed if None.
        endpoint: Further arguments of ``TrainerEndpoint``.
        descriptors: Limit of open descriptors of every rank, if any.
        rename: Passed to ``ModuleSource``.
    """

    cfg: Config
    layout: str = "plain"
    ranks: int = 1
    dtype: torch.dtype = torch.bfloat16
    cast: dict[str, str] = field(default_factory=dict)
    tie: bool = False
    tp_dim: int = 1
    weights: Callable[[Config, int], Weights] | None = None
    endpoint: dict[str, object] = field(default_factory=dict)
    descriptors: int | None = None
    rename: Callable[[str], str] | None = None

    def full(self, version: int) -> Weights:
        """Unsharded weights of a version, in the dtype ``weights`` makes them."""
        if self.weights is not None:
            return self.weights(self.cfg, version)
        return random_weights(self.cfg, 1000 + version)


class Holder(torch.nn.Module):
    """Parameters under checkpoint names, nested as modules so that FSDP2 can shard them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            module: torch.nn.Module = self
            *path, leaf = name.split(".")
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]
            module.register_parameter(
                leaf, torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point())
            )


def build_module(spec: TrainerSpec) -> Holder:
    """The rank's module, holding version 0."""
    module = Holder({n: t.to(spec.dtype) for n, t in spec.full(0).items()})
    if spec.tie:
        module.add_module("lm_head", torch.nn.Module())
        module.lm_head.register_parameter("weight", module.model.embed_tokens.weight)
    if spec.layout == "plain":
        return module
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if spec.layout == "fsdp":
        fully_shard(module, mesh=init_device_mesh("cpu", (spec.ranks,)))
        return module
    tp = spec.ranks if spec.layout == "tp" else 2
    mesh = init_device_mesh("cpu", (spec.ranks // tp, tp), mesh_dim_names=("dp", "tp"))
    _cut(module, mesh["tp"], spec.tp_dim)
    if spec.layout == "fsdp_tp":
        fully_shard(module, mesh=mesh["dp"])
    return module


def _cut(module: Holder, mesh: object, dim: int) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    done: dict[int, torch.nn.Parameter] = {}
    for sub in module.modules():
        for key, parameter in list(sub._parameters.items()):
            if id(parameter) not in done:
                axis = dim if parameter.dim() > 1 else 0
                done[id(parameter)] = torch.nn.Parameter(
                    distribute_tensor(parameter.data, mesh, [Shard(axis)])
                )
            sub.register_parameter(key, done[id(parameter)])


def load(module: Holder, spec: TrainerSpec, version: int) -> None:
    """Writes a version in place, shard by shard, without gathering."""
    from torch.distributed.tensor import DTensor

    from weight_sync.sources.dtensor import region_of

    full = spec.full(version)
    for name, parameter in module.named_parameters():
        target = parameter._local_tensor if isinstance(parameter, DTensor) else parameter.data
        box = region_of(name, parameter)
        if box is None or not target.numel():
            continue
        at = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
        target.detach().copy_(full[name].to(spec.dtype)[at])


class Rank:
    """One trainer rank, inside its process."""

    def __init__(self, spec: TrainerSpec, rank: int, port: int) -> None:
        from weight_sync.sources.module import ModuleSource
        from weight_sync.trainer.endpoint import TrainerEndpoint

        if spec.descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (spec.descriptors, spec.descriptors))
        if spec.layout != "plain":
            os.environ.update(
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                RANK=str(rank),
                WORLD_SIZE=str(spec.ranks),
            )
            torch.distributed.init_process_group("gloo")
        self.spec = spec
        self.module = build_module(spec)
        source = ModuleSource(self.module, cast=spec.cast, rename=spec.rename)
        self.endpoint = TrainerEndpoint(source, rank, **spec.endpoint)  # type: ignore[arg-type]

    def info(self) -> TrainerEndpointInfo:
        return self.endpoint.info

    def load(self, weights: int) -> None:
        load(self.module, self.spec, weights)

    def publish(self, version: int, weights: int) -> None:
        """Publishes the weights of ``weights`` as ``version``."""
        self.load(weights)
        self.endpoint.publish(version)

    def wait(self, version: int, seconds: float) -> None:
        self.endpoint.wait(version, seconds)

    def counts(self) -> tuple[int, int, int]:
        return process_counts()

    def call(self, function: Callable[..., object], *args: object) -> object:
        """Runs a function of the test on this rank."""
        return function(self, *args)

    def stop(self) -> None:
        self.endpoint.close()


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Trainers:
    """Trainer ranks as child processes; a context manager that always ends them."""

    def __init__(self, spec: TrainerSpec, env: Mapping[str, str | None] | None = None) -> None:
        self.spec = spec
        port = free_port()
        self.ranks = [Child(Rank, spec, rank, port, env=env) for rank in range(spec.ranks)]
        self.infos: list[TrainerEndpointInfo] = self.ask("info")  # type: ignore[assignment]

    def send(self, method: str, *args: object) -> None:
        for rank in self.ranks:
            rank.send(method, *args)

    def receive(self, seconds: float = 60) -> list[object]:
        return [rank.receive(seconds) for rank in self.ranks]

    def ask(self, method: str, *args: object, seconds: float = 60) -> list[object]:
        """Runs a method on all ranks and returns their answers."""
        self.send(method, *args)
        return self.receive(seconds)

    def publish(self, version: int, weights: int | None = None) -> None:
        """All ranks publish ``version`` with the weights of ``weights`` (or of that version)."""
        self.ask("publish", version, version if weights is None else weights)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def infos(trainers: Sequence[Trainers]) -> list[TrainerEndpointInfo]:
    """Endpoints of several groups of ranks, in order."""
    return [info for group in trainers for info in group.infos]
