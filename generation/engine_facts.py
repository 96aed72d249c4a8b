"""Facts read from a vLLM engine's process, the same for both front ends."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

from generation.metrics import flatten_engine_metrics

_TOOL_TIMEOUT_S = 20.0


def read_counters() -> dict[str, float | list[float]]:
    """Returns the counters of the engine in this process, folded as one worker's snapshot."""
    from vllm.v1.metrics.reader import get_metrics_snapshot

    return flatten_engine_metrics(get_metrics_snapshot())


def connector_can_reset(vllm_config: Any) -> bool:  # noqa: ANN401 - vLLM's class
    """Whether a refit can drop what the engine's KV connector cached; True without a connector.

    vLLM takes a connector that has no ``reset_cache`` of its own for one that did reset.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return True
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    connector = KVConnectorFactory.get_connector_class(transfer)
    return connector.reset_cache is not KVConnectorBase_V1.reset_cache


def has_profiler(vllm_config: Any) -> bool:  # noqa: ANN401 - vLLM's class
    """Whether workers have a profiler: starting one that they lack raises on every rank, and the
    replies that nobody reads would shift all later ones."""
    profiler = getattr(vllm_config, "profiler_config", None)
    return getattr(profiler, "profiler", None) is not None


def callers_errors() -> tuple[type[Exception], ...]:
    """What vLLM raises for requests that are wrong, as opposed to engines that are."""
    try:
        from vllm.exceptions import VLLMClientError
    except ImportError:
        return (ValueError,)
    return (ValueError, VLLMClientError)


def report_devices(count: int) -> list[str]:
    """Identity of the devices of a shard's ``count`` workers: GPU UUIDs, or ``cpu`` for each."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return ["cpu"] * count
    return gpu_uuids()[:count]


def gpu_uuids() -> list[str]:
    """UUIDs of the GPUs this process may use, in its own order; initializes no device."""
    import os

    tool = shutil.which("nvidia-smi")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if tool is None:
        return []
    lines = subprocess.run(
        [tool, "--query-gpu=index,uuid", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=_TOOL_TIMEOUT_S,
        check=True,
    ).stdout.splitlines()
    by_index = dict(line.split(", ") for line in lines)
    wanted = list(by_index) if visible is None else [i for i in visible.split(",") if i]
    return [by_index.get(i, i) for i in wanted]
