"""Other ways to give vLLM new weights, timed beside ours in the same run."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Protocol

import torch

from bench.engines import Fleet, LocalFleet
from bench.grids import EngineGrid
from bench.models import Config, random_weights, shapes
from bench.options import Options
from bench.trainer_process import TrainerProcesses

if TYPE_CHECKING:
    from vllm import LLM


class NativeSystem(Protocol):
    """One way of vLLM's own or of another project."""

    name: str

    def refit(self) -> float:
        """Installs the trainer's current weights; returns seconds from start to finish."""
        ...


class NativeIpc:
    """vLLM's ipc engine: handles of every tensor, then its own loaders."""

    name = "vllm-native ipc"

    def __init__(self, llm: LLM, trainers: TrainerProcesses) -> None:
        self._llm = llm
        self._trainers = trainers
        llm.init_weight_transfer_engine({"init_info": {}})

    def refit(self) -> float:
        """``start_weight_update`` to ``finish_weight_update``."""
        start = time.perf_counter()
        self._llm.start_weight_update()
        (info,) = self._trainers.ask("ipc_handles")
        self._llm.update_weights({"update_info": info})
        self._llm.finish_weight_update()
        torch.cuda.synchronize()
        return time.perf_counter() - start


class NativeNccl:
    """vLLM's nccl engine, packed: one broadcast of every full tensor, by trainer rank 0.

    Where several ranks share the weights, each tensor is put together on rank 0 right before, as
    this engine wants it.
    """

    name = "vllm-native nccl packed"

    def __init__(
        self, fleet: Fleet, trainers: TrainerProcesses, cfg: Config, engine: EngineGrid
    ) -> None:
        self._fleet = fleet
        self._trainers = trainers
        self._shards = engine.dp
        known = list(shapes(cfg))
        self._update: dict[str, object] = {
            "names": [n for n, _ in known],
            "dtype_names": ["bfloat16"] * len(known),
            "shapes": [list(s) for _, s in known],
            "packed": True,
        }
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        trainers.post("join", "127.0.0.1", port, 1 + engine.workers)
        meeting = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "world_size": 1 + engine.workers,
        }
        fleet.ask(
            "init_weight_transfer_engine",
            [
                ({"init_info": meeting | {"rank_offset": 1 + shard * engine.tp}},)
                for shard in range(engine.dp)
            ],
        )
        trainers.collect()

    def refit(self) -> float:
        """``start_weight_update`` to ``finish_weight_update``."""
        start = time.perf_counter()
        self._all("start_weight_update")
        self._trainers.post("send", True)
        self._all("update_weights", {"update_info": self._update})
        self._all("finish_weight_update")
        torch.cuda.synchronize()
        self._trainers.collect()
        return time.perf_counter() - start

    def _all(self, method: str, *args: object) -> None:
        self._fleet.ask(method, [args] * self._shards)


class CheckpointEngine:
    """checkpoint-engine's parameter server, on the engine's GPU: through pinned host memory.

    One refit is what a trainer has to do after a step: register the new weights, gather their
    metadata, update. Its process group is built once, before.
    """

    name = "checkpoint-engine broadcast"

    def __init__(self, llm: LLM, trainers: TrainerProcesses) -> None:
        self._llm = llm
        self._trainers = trainers

    def refit(self) -> float:
        """``register_checkpoint`` to the end of ``update``."""
        start = time.perf_counter()
        self._trainers.post("update_by_checkpoint_engine")
        (paths,) = self._trainers.collect()
        self._llm.collective_rpc("update_weights_from_ipc", args=(paths,))
        self._trainers.collect()
        torch.cuda.synchronize()
        return time.perf_counter() - start


class NativeReload:
    """vLLM's in-process reload from tensors that are already in the engine's process.

    There is no transfer in it at all, so it is the best case of any engine built on it.
    """

    name = "vllm-native reload"

    def __init__(self, llm: LLM, cfg: Config) -> None:
        self._llm = llm
        self._weights = random_weights(cfg, 77)

    def refit(self) -> float:
        """One ``reload_weights``."""
        worker = self._llm.llm_engine.model_executor.driver_worker.worker
        start = time.perf_counter()
        worker.reload_weights(weights_iterator=iter(self._weights.items()))
        return time.perf_counter() - start


def start_natives(
    options: Options, cfg: Config, fleet: Fleet, trainers: TrainerProcesses
) -> list[NativeSystem]:
    """What the options ask to be timed beside this library."""
    out: list[NativeSystem] = []
    if "vllm-native" in options.against:
        if options.device == "cpu":
            assert isinstance(fleet, LocalFleet)
            out.append(NativeReload(fleet.llm, cfg))
        elif isinstance(fleet, LocalFleet) and options.trainer_devices[0] == "cuda:0":
            out.append(NativeIpc(fleet.llm, trainers))
        else:
            out.append(NativeNccl(fleet, trainers, cfg, options.engine))
    if "checkpoint-engine" in options.against:
        assert isinstance(fleet, LocalFleet)
        out.append(CheckpointEngine(fleet.llm, trainers))
    return out
