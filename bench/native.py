"""Other ways to give vLLM new weights, timed beside ours in the same run."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING, Protocol

import torch

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
    """vLLM's nccl engine, packed: one broadcast of every full tensor."""

    name = "vllm-native nccl packed"

    def __init__(self, llm: LLM, trainers: TrainerProcesses, cfg: dict[str, object]) -> None:
        from bench.models import shapes

        self._llm = llm
        self._trainers = trainers
        self._shapes = list(shapes(cfg))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        trainers.post("join", "127.0.0.1", port)
        llm.init_weight_transfer_engine(
            {
                "init_info": {
                    "master_address": "127.0.0.1",
                    "master_port": port,
                    "rank_offset": 1,
                    "world_size": 2,
                }
            }
        )
        trainers.collect()

    def refit(self) -> float:
        """``start_weight_update`` to ``finish_weight_update``."""
        start = time.perf_counter()
        self._llm.start_weight_update()
        self._trainers.post("send", True)
        self._llm.update_weights(
            {
                "update_info": {
                    "names": [n for n, _ in self._shapes],
                    "dtype_names": ["bfloat16"] * len(self._shapes),
                    "shapes": [list(s) for _, s in self._shapes],
                    "packed": True,
                }
            }
        )
        self._llm.finish_weight_update()
        torch.cuda.synchronize()
        self._trainers.collect()
        return time.perf_counter() - start


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

    def __init__(self, llm: LLM, cfg: dict[str, object]) -> None:
        from bench.models import random_weights

        self._llm = llm
        self._weights = random_weights(cfg, 77)

    def refit(self) -> float:
        """One ``reload_weights``."""
        worker = self._llm.llm_engine.model_executor.driver_worker.worker
        start = time.perf_counter()
        worker.reload_weights(weights_iterator=iter(self._weights.items()))
        return time.perf_counter() - start
