"""Real vLLM engines of a benchmark: one shard in this process, or each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bench.engine_process import EngineProcess
from bench.models import Config, random_weights, write_checkpoint, write_config
from bench.options import Options
from weight_sync.engine import EngineShard, LocalLLM

if TYPE_CHECKING:
    from vllm import LLM

_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    # Trainers must have the same; vLLM sets the first one in its own processes.
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
}


class Fleet(Protocol):
    """All shards of the engine.

    Attributes:
        shards: As the synchronizer sees them.
    """

    shards: Sequence[EngineShard]

    def ask(self, method: str, args: Sequence[tuple[object, ...]]) -> None:
        """Runs a method of vLLM's ``LLM`` on every shard at once, with arguments of its own."""
        ...


class LocalFleet:
    """One shard, whose ``LLM`` is in this process.

    Args:
        llm: The engine.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.shards: Sequence[EngineShard] = (LocalLLM(llm),)

    def ask(self, method: str, args: Sequence[tuple[object, ...]]) -> None:
        """See :class:`Fleet`."""
        (mine,) = args
        getattr(self.llm, method)(*mine)


class ProcessFleet:
    """Several shards, each in a process of its own; a context manager that always ends them.

    Args:
        options: What to run.
        cfg: Configuration of the model.
        folder: Where engines find it.
    """

    def __init__(self, options: Options, cfg: Config, folder: Path) -> None:
        write(options, cfg, folder)
        width, devices = options.engine.tp, options.engine_devices
        self._processes = [
            EngineProcess(devices[shard * width : (shard + 1) * width], arguments(options, folder))
            for shard in range(options.engine.dp)
        ]
        self._pool = ThreadPoolExecutor(options.engine.dp, thread_name_prefix="shard")
        self.shards: Sequence[EngineShard] = self._processes
        try:
            for process in self._processes:
                process.ready()
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, args: Sequence[tuple[object, ...]]) -> None:
        """See :class:`Fleet`."""
        calls = [
            self._pool.submit(process.ask, "llm_call", method, *mine)
            for process, mine in zip(self._processes, args, strict=True)
        ]
        for call in calls:
            call.result()

    def close(self) -> None:
        """Ends all shards."""
        for process in self._processes:
            process.close()
        self._pool.shutdown(wait=False)

    def __enter__(self) -> ProcessFleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def prepare_environment() -> None:
    """Sets what engines and trainers of a benchmark need, unless it is set already."""
    for key, value in _ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    # Workers must not be forked from a process that uses CUDA or has threads.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


def start_engine(options: Options, cfg: Config, folder: Path, **engine: object) -> LLM:
    """An engine of a configuration in this process."""
    import vllm

    write(options, cfg, folder)
    return vllm.LLM(**arguments(options, folder), **engine)


def write(options: Options, cfg: Config, folder: Path) -> None:
    """What engines start from; on GPUs their first weights are vLLM's own dummies."""
    if options.device == "cuda":
        write_config(cfg, folder)
    else:
        write_checkpoint(cfg, random_weights(cfg, 0), folder)


def arguments(options: Options, folder: Path) -> dict[str, object]:
    """Arguments of ``LLM`` for one shard."""
    from weight_sync.vllm.worker_extension import EXTENSION

    out: dict[str, object] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "tensor_parallel_size": options.engine.tp,
        "worker_extension_cls": EXTENSION,
    }
    if options.engine.expert:
        out["enable_expert_parallel"] = True
    if options.engine.tp > 1:
        out["distributed_executor_backend"] = "mp"
        # It takes peer access of its own kind, and no request is timed here.
        out["disable_custom_all_reduce"] = True
    if options.device == "cuda":
        out["load_format"] = "dummy"
        out["gpu_memory_utilization"] = options.memory
        if "vllm-native" in options.against:
            from vllm.config import WeightTransferConfig

            backend = "ipc" if options.trainer_devices[0] == "cuda:0" else "nccl"
            out["weight_transfer_config"] = WeightTransferConfig(backend=backend)
        if "checkpoint-engine" in options.against:
            out["worker_extension_cls"] = "bench.checkpoint_engine_worker.BothExtensions"
    return out
