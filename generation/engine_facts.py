"""Facts read from a vLLM engine's process, the same for both front ends."""

from __future__ import annotations

from typing import Any

from generation.metrics import flatten_engine_metrics


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


def require_engine(llm: Any) -> None:  # noqa: ANN401 - vLLM's LLM
    """Looks whether the engine behind an ``LLM`` lives; from any thread, also during a call.

    Raises:
        EngineDeadError: vLLM's own; the engine's process, or a worker process of it, is gone.
    """
    core = llm.llm_engine.engine_core
    inside = getattr(core, "engine_core", None)
    if inside is None:  # the engine has a process of its own
        dead = core.resources.engine_dead
    else:  # only executors whose workers are processes can lose one
        dead = getattr(inside.model_executor, "is_failed", False)
    if dead:
        from vllm.v1.engine.exceptions import EngineDeadError

        raise EngineDeadError


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
    # Reads the driver's management library: the leader's process itself must not touch a GPU.
    return [str(current_platform.get_device_uuid(index)) for index in range(count)]
