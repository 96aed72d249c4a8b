"""A thin facade over a fleet of vLLM engines on Ray: lifecycle and dispatch, never bytes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from generation.capture import CaptureSink, InMemorySink, JsonLinesSink
    from generation.cluster import RayCluster
    from generation.config import VllmConfig, VllmSpecificArgs
    from generation.fleet import FleetHealthPolicy, GenerationFleetHealth
    from generation.keeper import FleetKeeper
    from generation.limits import Limits
    from generation.router import GenerationRouter
    from generation.selector import HealthyShardSelector
    from generation.settings import ControllerSettings
    from generation.supervisor import EngineSupervisor
    from generation.telemetry import TelemetrySink
    from generation.token_capture import in_memory_sink
    from generation.vllm_generation import VllmGeneration

# Loaded when asked for: most modules of this package are used where Ray and torch are not.
_HOMES = {
    "CaptureSink": "capture",
    "ControllerSettings": "settings",
    "EngineSupervisor": "supervisor",
    "FleetHealthPolicy": "fleet",
    "FleetKeeper": "keeper",
    "GenerationFleetHealth": "fleet",
    "GenerationRouter": "router",
    "HealthyShardSelector": "selector",
    "InMemorySink": "capture",
    "JsonLinesSink": "capture",
    "Limits": "limits",
    "RayCluster": "cluster",
    "TelemetrySink": "telemetry",
    "VllmConfig": "config",
    "VllmGeneration": "vllm_generation",
    "VllmSpecificArgs": "config",
    "in_memory_sink": "token_capture",
}

__all__ = [
    "CaptureSink",
    "ControllerSettings",
    "EngineSupervisor",
    "FleetHealthPolicy",
    "FleetKeeper",
    "GenerationFleetHealth",
    "GenerationRouter",
    "HealthyShardSelector",
    "InMemorySink",
    "JsonLinesSink",
    "Limits",
    "RayCluster",
    "TelemetrySink",
    "VllmConfig",
    "VllmGeneration",
    "VllmSpecificArgs",
    "in_memory_sink",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the type of the name asked for
    """Imports an exported name from the module it lives in."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
