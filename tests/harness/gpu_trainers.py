"""Trainer ranks on GPUs: a process per rank, with as many sets of weights as a test opens."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection

import torch

from bench.models import Config, random_weights, shapes
from tests.harness.trainers import Holder, TrainerSpec, Weights, free_port, load
from weight_sync.messages import TrainerEndpointInfo

#: How a set of weights is held: in GPU memory; as fp32 masters; in host memory; half of each; in
#: expandable segments; in the pool of vLLM's sleep mode; sharded by FSDP2. "rounded" holds in bf16
#: what "fp32" holds in full.
KINDS = ("plain", "fp32", "rounded", "host", "mixed", "expandable", "cumem", "fsdp")
_ALIGN = 256


_made: dict[str, Weights] = {}


def made(cfg: Config, version: int, dtype: torch.dtype = torch.bfloat16) -> Weights:
    """Random weights of a version, as ``TrainerSpec`` makes them; the last few are kept."""
    key = repr((cfg, version, dtype))
    if key not in _made:
        while len(_made) >= 3:
            del _made[next(iter(_made))]
        _made[key] = random_weights(cfg, 1000 + version, dtype=dtype)
    return _made[key]


def masters(cfg: Config, version: int) -> Weights:
    """fp32 weights that bf16 cannot hold."""
    return made(cfg, version, torch.float32)


def rounded(cfg: Config, version: int) -> Weights:
    """The same, rounded by torch."""
    return {n: t.to(torch.bfloat16) for n, t in masters(cfg, version).items()}


def specification(cfg: Config, kind: str, world: int) -> TrainerSpec:
    """What ``load`` writes."""
    if kind == "fp32":
        return TrainerSpec(cfg, dtype=torch.float32, cast={"*": "bfloat16"}, weights=masters)
    if kind == "rounded":
        return TrainerSpec(cfg, weights=rounded)
    return TrainerSpec(cfg, "fsdp" if kind == "fsdp" else "plain", world, weights=made)


@contextlib.contextmanager
def _expandable() -> Iterator[None]:
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")


def _tensors(cfg: Config, kind: str, dtype: torch.dtype, device: torch.device) -> Weights:
    """Uninitialized weights in memory of the asked kind."""
    if kind == "mixed":
        on_gpu = _tensors(cfg, "plain", dtype, device)
        on_host = _tensors(cfg, "host", dtype, device)
        return {n: (on_gpu if i % 2 else on_host)[n] for i, n in enumerate(on_gpu)}
    if kind not in ("expandable", "cumem"):
        where = torch.device("cpu") if kind == "host" else device
        return {n: torch.empty(s, dtype=dtype, device=where) for n, s in shapes(cfg)}
    sizes = {n: -(-prod(s) * dtype.itemsize // _ALIGN) * _ALIGN for n, s in shapes(cfg)}
    place: contextlib.AbstractContextManager[object] = _expandable()
    if kind == "cumem":
        from vllm.device_allocator.cumem import CuMemAllocator

        place = CuMemAllocator.get_instance().use_memory_pool(tag="weights")
    with place:
        # Larger than what torch keeps for small tensors, so that it is memory of this kind alone.
        total = max(sum(sizes.values()), 64 << 20)
        flat = torch.empty(total, dtype=torch.uint8, device=device)
    out, at = {}, 0
    for name, shape in shapes(cfg):
        part = flat[at : at + prod(shape) * dtype.itemsize]
        out[name] = part.view(dtype).reshape(shape)
        at += sizes[name]
    return out


@dataclass
class _Set:
    spec: TrainerSpec
    module: Holder
    endpoint: object


class GpuRank:
    """One rank, inside its process."""

    def __init__(self, device: str, rank: int, world: int, port: int) -> None:
        self._device = torch.device(device)
        self._rank, self._world, self._port = rank, world, port
        self._sets: dict[str, _Set] = {}
        torch.cuda.set_device(self._device)

    def open(self, name: str, cfg: Config, kind: str, rank: int) -> TrainerEndpointInfo:
        """A set of weights of a kind of ``KINDS`` and its endpoint."""
        from weight_sync.sources.module import ModuleSource
        from weight_sync.trainer.endpoint import TrainerEndpoint

        spec = specification(cfg, kind, self._world)
        module = Holder(_tensors(cfg, kind, spec.dtype, self._device))
        if kind == "fsdp":
            self._shard(module)
        endpoint = TrainerEndpoint(ModuleSource(module, cast=spec.cast), rank, engine_device="cuda")
        self._sets[name] = _Set(spec, module, endpoint)
        return endpoint.info

    def _shard(self, module: Holder) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if not torch.distributed.is_initialized():
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(self._port))
            os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(self._world))
            torch.distributed.init_process_group("nccl")
        fully_shard(module, mesh=init_device_mesh("cuda", (self._world,)))

    def publish(self, name: str, version: int, weights: int) -> None:
        """Publishes the weights of ``weights`` as ``version``."""
        held = self._sets[name]
        load(held.module, held.spec, weights)
        torch.cuda.synchronize()
        held.endpoint.publish(version)  # type: ignore[attr-defined]

    def publish_late(self, name: str, version: int, value: float) -> None:
        """Publishes while a side stream still works for 50 ms before it writes ``value``."""
        held = self._sets[name]
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad():
            torch.cuda._sleep(100_000_000)
            for parameter in held.module.parameters():
                parameter.fill_(value)
            held.endpoint.publish(version)  # type: ignore[attr-defined]

    def overwrite(self, name: str, value: float) -> None:
        """What a trainer may do as soon as a refit returned."""
        with torch.no_grad():
            for parameter in self._sets[name].module.parameters():
                parameter.fill_(value)

    def move(self, name: str) -> None:
        """Puts every weight into new memory and gives the old back to the driver."""
        held = self._sets[name]
        held.endpoint.forget()  # type: ignore[attr-defined]
        kept = [torch.empty_like(p) for p in held.module.parameters()]
        for parameter, memory in zip(held.module.parameters(), kept, strict=True):
            parameter.data = memory.detach()
        torch.cuda.empty_cache()

    def forget(self, name: str) -> None:
        """Gives staging memory back, as before a trainer offloads."""
        self._sets[name].endpoint.forget()  # type: ignore[attr-defined]

    def slots(self, name: str) -> list[list[int]]:
        """Bytes of the slots of every staging ring."""
        rings = self._sets[name].endpoint._rings.values()  # type: ignore[attr-defined]
        return [[memory.numel() for memory in ring._packer.slots] for ring in rings]

    def memory(self) -> tuple[int, int, int]:
        """(allocated, reserved, open descriptors)."""
        torch.cuda.synchronize()
        descriptors = len(os.listdir("/proc/self/fd"))
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), descriptors

    def close(self, name: str) -> None:
        """Ends a set of weights."""
        self._sets.pop(name).endpoint.close()  # type: ignore[attr-defined]
        torch.cuda.empty_cache()


def _serve(device: str, rank: int, world: int, port: int, pipe: Connection) -> None:
    served = GpuRank(device, rank, world, port)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(served, method)(*args)))
        except Exception as error:  # The test looks at it.
            pipe.send((False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


class GpuTrainers:
    """Rank processes; a context manager that always ends them.

    Args:
        devices: Device of each rank, as its process sees it.
        env: Variables that the processes start with.
    """

    def __init__(self, devices: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        before = dict(os.environ)
        os.environ.update(env or {})
        port = free_port()
        self._pipes, self._processes = [], []
        try:
            for rank, device in enumerate(devices):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_serve, args=(device, rank, len(devices), port, theirs), daemon=True
                )
                process.start()
                theirs.close()
                self._pipes.append(ours)
                self._processes.append(process)
        finally:
            os.environ.clear()
            os.environ.update(before)
        self._opened = 0

    def ask(self, method: str, *args: object, seconds: float = 120) -> list:
        """Runs a method on all ranks at once."""
        return self.ask_each(method, [args] * len(self._pipes), seconds)

    def ask_each(self, method: str, args: Sequence[tuple], seconds: float = 120) -> list:
        """Runs a method on every rank with arguments of its own.

        Raises:
            RuntimeError: With the traceback of the first rank that failed.
        """
        for pipe, mine in zip(self._pipes, args, strict=True):
            pipe.send((method, mine))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(seconds):
                raise TimeoutError(f"trainer rank {rank} did not answer {method} in {seconds} s")
            answers.append(pipe.recv())
        for good, value in answers:
            if not good:
                raise RuntimeError(value)
        return [value for _, value in answers]

    @contextlib.contextmanager
    def weights(self, cfg: Config, kind: str, first: int = 0) -> Iterator[OpenWeights]:
        """Weights on every rank for the time of a block, as trainer ranks ``first`` and up."""
        self._opened += 1
        name = f"{kind}-{self._opened}"
        args = [(name, cfg, kind, first + rank) for rank in range(len(self._pipes))]
        opened = OpenWeights(self, name, self.ask_each("open", args))
        try:
            yield opened
        finally:
            self.ask("close", name)

    def __enter__(self) -> GpuTrainers:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)


@dataclass(frozen=True)
class OpenWeights:
    """One set of weights on all ranks."""

    trainers: GpuTrainers
    name: str
    infos: list[TrainerEndpointInfo]

    def ask(self, method: str, *args: object) -> list:
        """Runs a method on this set of weights, on all ranks."""
        return self.trainers.ask(method, self.name, *args)

    def publish(self, version: int, weights: int | None = None) -> None:
        """All ranks publish."""
        self.ask("publish", version, version if weights is None else weights)
