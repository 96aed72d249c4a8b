"""Real vLLM on GPUs, in the test's process or with workers of its own, and what shows of it."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from bench.models import Config, random_weights, write_checkpoint
from tests.harness.dumps import Dump, dump
from weight_sync.vllm.worker_extension import WeightSyncExtension
from weight_sync.worker.agent import WorkerAgent

if TYPE_CHECKING:
    from vllm import LLM

PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7], list(range(20, 60)), [1]]
KV_BYTES = 1 << 30
#: Full CUDA graphs of the decode steps without torch.compile, which would change numerics and take
#: a minute.
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8],
}
Bits = dict[str, str]


def checkpoint(cfg: Config, version: int, folder: Path) -> Path:
    """The weights that trainers call ``version``, on disk."""
    return write_checkpoint(cfg, random_weights(cfg, 1000 + version), folder)


def start(folder: Path, **options: Any) -> LLM:
    """An engine; eager and with one worker unless told otherwise."""
    from vllm import LLM

    given: dict[str, Any] = {"enforce_eager": "compilation_config" not in options, **options}
    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        seed=0,
        kv_cache_memory_bytes=KV_BYTES,
        gpu_memory_utilization=0.2,
        worker_extension_cls="tests.harness.gpu_engines.ObservedExtension",
        **given,
    )


def collect() -> None:
    """Frees what nothing refers to, so that the next engine finds an empty GPU."""
    gc.collect()
    torch.cuda.empty_cache()


def worker_of(llm: LLM) -> Any:
    """The one worker of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker


def model_of(llm: LLM) -> torch.nn.Module:
    """Its model."""
    return worker_of(llm).model_runner.model


def agent_of(llm: LLM) -> WorkerAgent:
    """Its refit agent."""
    return worker_of(llm).__dict__["_weight_sync_agent"]


def tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def plain_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in plain attributes of modules and their quant methods."""
    for name, module in model.named_modules():
        for kind, holder in (("", module), ("method ", getattr(module, "quant_method", None))):
            for key, value in list(getattr(holder, "__dict__", {}).items()):
                if isinstance(value, torch.Tensor):
                    yield f"{kind}{name}.{key}", value


def bits(model: torch.nn.Module) -> Bits:
    """A digest of every parameter and buffer."""
    return {name: digest(tensor) for name, tensor in tensors(model)}


def digest(tensor: torch.Tensor) -> str:
    """A digest of a tensor's bytes."""
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(data.numpy().tobytes(), digest_size=16).hexdigest()


def addresses(model: torch.nn.Module) -> dict[str, int]:
    """Where every tensor lies that a captured graph may read."""
    everything = [*tensors(model), *plain_tensors(model)]
    return {name: tensor.data_ptr() for name, tensor in everything}


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Names whose values differ, or that are gone."""
    return sorted(n for n in before if before[n] != after.get(n))


def greedy(llm: LLM) -> list[list[int]]:
    """16 greedy tokens per prompt, each prompt computed as a whole: no cached prefix."""
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in PROMPTS],
        SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True),
        use_tqdm=False,
    )
    return [list(o.outputs[0].token_ids) for o in outputs]


class ObservedExtension(WeightSyncExtension):
    """What tests ask of workers in processes of their own."""

    def observed_bits(self) -> Bits:
        """Digests of all parameters and buffers."""
        return bits(self.model_runner.model)  # type: ignore[attr-defined]

    def observed_dump(self) -> Dump:
        """The same, and what CPU vLLM keeps of a packed linear."""
        return dump(self.model_runner.model, self.vllm_config)  # type: ignore[attr-defined]

    def observed_device(self) -> str:
        """UUID of the worker's GPU."""
        from weight_sync.identity import device_identity

        return device_identity(torch.device(self.device).index)  # type: ignore[attr-defined]
