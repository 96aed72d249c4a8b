"""The processes of the fault matrix: trainer ranks, stand-in workers and the orchestrator."""

from __future__ import annotations

import resource
import threading
from collections.abc import Sequence

import torch
from msgspec import structs

from bench.fault_census import Census, census
from bench.fault_injection import Fault, Injector
from bench.models import Config, random_weights
from tests.harness.sources import BoxSource, rows
from tests.harness.standin_models import fused
from weight_sync.comm.deadline import Deadline
from weight_sync.errors import PeerDeadError
from weight_sync.fanout import raise_first, run_all
from weight_sync.messages import TrainerEndpointInfo
from weight_sync.synchronizer import WeightSynchronizer
from weight_sync.trainer.endpoint import TrainerEndpoint
from weight_sync.wire.address import Address
from weight_sync.wire.client import Client
from weight_sync.wire.server import Server
from weight_sync.worker.agent import WorkerAgent

# Different weights, so that mixed versions show.
WEIGHTS = 4
# Longest call of an engine; the synchronizer's own deadline is shorter.
_CALL_SECONDS = 60.0
# Below this, a trainer cannot export its storages one by one and stages them in buckets.
_FEW_DESCRIPTORS = 240
_AGENT = b"agent"


def weights_of(version: int) -> int:
    """Which weights a version has."""
    return version % WEIGHTS


class _Armed:
    """A process with an injector."""

    def __init__(self) -> None:
        self.injector = Injector()

    def arm(self, fault: Fault) -> None:
        """Arms a fault whose hook this process has."""
        self.injector.arm(fault)

    def expect(self, kind: str, at_once: bool) -> None:
        """Prepares for a fault that another process sets off."""
        self.injector.expect(kind, at_once)

    def disarm(self) -> list[tuple[str, int]]:
        """Forgets a fault that did not happen; returns what hooks saw since the last time."""
        return self.injector.disarm()

    def census(self) -> Census:
        """What this process holds."""
        return census()


class FaultTrainer(_Armed):
    """One trainer rank that holds its share of the rows of every tensor.

    Args:
        cfg: Model configuration.
        rank: Its rank.
        ranks: Number of ranks.
        staged: Whether its storages cannot be exported, so that ipc packs them into buckets.
    """

    def __init__(self, cfg: Config, rank: int, ranks: int, staged: bool) -> None:
        super().__init__()
        if staged:
            resource.setrlimit(resource.RLIMIT_NOFILE, (_FEW_DESCRIPTORS, _FEW_DESCRIPTORS))
        self._weights = [random_weights(cfg, 1000 + w) for w in range(WEIGHTS)]
        self._share = {
            name: (len(t) * rank // ranks, len(t) * (rank + 1) // ranks)
            for name, t in self._weights[0].items()
        }
        held = {n: rows(t, *self._share[n]) for n, t in self._weights[0].items()}
        self._held = {n: h.parts[0][1] for n, h in held.items() if h.parts}
        self._endpoint = TrainerEndpoint(BoxSource(held), rank, fault=self.injector)

    def info(self) -> TrainerEndpointInfo:
        """Where it listens."""
        return self._endpoint.info

    def publish(self, version: int) -> None:
        """Writes the weights of a version and publishes it."""
        full = self._weights[weights_of(version)]
        for name, tensor in self._held.items():
            first, last = self._share[name]
            tensor.copy_(full[name][first:last])
        self._endpoint.publish(version)

    def wait(self, version: int, seconds: float) -> None:
        """Waits until the refit of a version ended."""
        self._endpoint.wait(version, seconds)


class FaultWorker(_Armed):
    """One worker of a stand-in engine, with real parameters, behind the real agent.

    Args:
        cfg: Model configuration.
        rank: Rank in the shard.
        tp: Workers of the shard.
    """

    def __init__(self, cfg: Config, rank: int, tp: int) -> None:
        super().__init__()
        self._cfg, self._rank, self._tp = cfg, rank, tp
        self._model = fused(cfg, rank, tp).load(random_weights(cfg, 1000))
        self._agent = WorkerAgent(self._model, rank, self.injector)
        self._expected: dict[int, dict[str, torch.Tensor]] = {}
        # A replacement starts as engines do: with the checkpoint's weights, and no version.
        self._serving, self._stamp = True, -1
        self._busy = threading.Lock()
        self._server = Server(self._serve, threads=1)

    def address(self) -> Address:
        """Where its engine's front end reaches it."""
        return self._server.address

    def _serve(self, raw: bytes) -> bytes:
        name, _, payload = raw.partition(b"\0")
        with self._busy:
            match name:
                case b"agent":
                    return self._agent.handle(payload)
                case b"pause":
                    self._serving = False
                case b"resume":
                    self._serving = True
                case b"version":
                    self._stamp = int(payload)
        return b""

    def verdict(self, settle_s: float) -> tuple[bool, int, bool]:
        """Once it is idle: whether it serves, which version it reports, whether its bits agree."""
        if not self._busy.acquire(timeout=settle_s):
            raise TimeoutError(f"worker {self._rank} is still busy after {settle_s:g} s")
        try:
            return self._serving, self._stamp, self._equals(weights_of(max(self._stamp, 0)))
        finally:
            self._busy.release()

    def _equals(self, weights: int) -> bool:
        if weights not in self._expected:
            full = random_weights(self._cfg, 1000 + weights)
            self._expected[weights] = fused(self._cfg, self._rank, self._tp).load(full).tensors()
        have = self._model.tensors()
        return all(torch.equal(t, have[n]) for n, t in self._expected[weights].items())


class WireShard:
    """An ``EngineShard`` of :class:`FaultWorker` processes.

    Args:
        addresses: Its workers, in rank order.
        name: How errors call it.
    """

    def __init__(self, addresses: Sequence[Address], name: str) -> None:
        self.workers = len(addresses)
        self._addresses = {f"{name} worker {i}": a for i, a in enumerate(addresses)}
        self._clients = {n: Client(a, n) for n, a in self._addresses.items()}

    def _all(self, request: bytes, stage: str) -> list[bytes]:
        deadline = Deadline(_CALL_SECONDS)
        replies, errors = run_all(
            {n: n for n in self._clients},
            lambda n: self._clients[n].call(request, deadline, stage),
            deadline,
            stage,
        )
        for name, error in errors.items():
            if isinstance(error, PeerDeadError):
                # As front ends do: the next call tries to connect anew.
                self._clients[name].close()
                self._clients[name] = Client(self._addresses[name], name)
        raise_first(errors)
        return [replies[name] for name in self._clients]

    def call(self, request: bytes) -> list[bytes]:
        """Runs a request on every worker."""
        return self._all(_AGENT + b"\0" + request, "engine call")

    def pause(self) -> None:
        """Stops serving."""
        self._all(b"pause", "pause")

    def invalidate(self) -> None:
        """A stand-in caches nothing."""

    def resume(self) -> None:
        """Serves again."""
        self._all(b"resume", "resume")

    def set_version(self, version: int) -> None:
        """Stamps what is served."""
        self._all(b"version\0%d" % version, "set_version")

    def close(self) -> None:
        """Closes its connections."""
        for client in self._clients.values():
            client.close()


class FaultOrchestrator(_Armed):
    """The process that calls ``sync_weights``."""

    def __init__(
        self,
        transport: str,
        trainers: Sequence[TrainerEndpointInfo],
        shards: Sequence[Sequence[Address]],
        options: dict[str, float],
    ) -> None:
        super().__init__()
        self._shards: list[WireShard] = [
            WireShard(addresses, f"shard {i}") for i, addresses in enumerate(shards)
        ]
        self._synchronizer = WeightSynchronizer(
            trainers,
            self._shards,
            transport=transport,
            **options,  # type: ignore[arg-type]
        )

    def sync(self, version: int) -> dict[str, object]:
        """One refit; its report."""
        return structs.asdict(self._synchronizer.sync_weights(version))

    def replace(self, index: int, addresses: Sequence[Address]) -> None:
        """Takes a shard in, new or as it was; the next refit builds a new epoch."""
        old, shard = self._shards[index], WireShard(addresses, f"shard {index}")
        self._shards[index] = shard
        self._synchronizer.replace_shard(index, shard)
        old.close()

    def absent(self) -> tuple[int, ...]:
        """Shards that do not take part."""
        return self._synchronizer.absent
