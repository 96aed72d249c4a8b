"""What every worker actor of the facade has in common, whichever engine its leader hosts.

A shard has one actor per bundle. The first, its leader, owns the engine; vLLM's own executor gives
it one worker process per rank. The others only hold their bundles, so that nobody else is given the
devices, and tell the leader which devices those are.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from typing import Any

import ray

from generation.config import VllmConfig
from generation.engine_args import engine_arguments
from weight_sync.errors import EngineStateError

INITIAL_VERSION = 0
"""Weight version of what an engine loaded from its checkpoint, before any refit."""


class EngineActor:
    """Base of the leader and follower actors of one shard.

    Args:
        config: The fleet's config, with the HTTP key where one is required.
        shard: Number of the shard.
        owner: Whether this actor hosts the shard's engine.
        current: Whether the checkpoint holds weights that may be served. A replacement engine, or
            one with dummy weights, serves nothing before its first verified refit.
    """

    def __init__(self, config: VllmConfig, shard: int, owner: bool, current: bool) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise ImportError(
                "vLLM is not installed where the engines run; install the cpu extra, or vLLM for "
                "your CUDA version, on every node"
            )
        self.config = config
        self.shard = shard
        self.owner = owner
        self._version: int | None = INITIAL_VERSION if current else None
        self._label = INITIAL_VERSION
        self._engine: Any = None
        self._socket: socket.socket | None = None

    def __repr__(self) -> str:
        """The class name; Ray puts it before the actor's log lines."""
        return type(self).__name__

    def device_ids(self) -> list[str]:
        """Returns the ids of the devices Ray gave this actor; empty on a CPU cluster."""
        ids = ray.get_runtime_context().get_accelerator_ids()
        return [str(i) for i in ids.get("GPU", [])]

    def pid(self) -> int:
        """Returns the actor's process id."""
        return os.getpid()

    def llm(self) -> Any:  # noqa: ANN401 - vLLM's class
        """Returns the hosted engine; None before it is loaded and on followers."""
        return self._engine

    def reserve_port(self) -> str:
        """Binds the HTTP server's address and keeps it; returns its base URL."""
        if self._socket is None:
            host = ray.util.get_node_ip_address()
            self._socket = socket.create_server((host, 0), backlog=1024)
        host, port = self._socket.getsockname()[:2]
        return f"http://{host}:{port}/v1"

    def arguments(self, device_ids: list[str]) -> dict[str, Any]:
        """Prepares this process for the shard's devices and returns the engine's arguments."""
        if device_ids:
            # Before anything here initializes CUDA: Ray showed this actor its own device only.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(device_ids)
        from vllm.platforms import current_platform

        sleep_mode = self.config.colocated and current_platform.is_sleep_mode_available()
        return engine_arguments(self.config, self.shard, sleep_mode=sleep_mode)

    def require_ready(self) -> int:
        """Returns the weight version that outputs are stamped with.

        Raises:
            EngineStateError: No engine, or one that holds no weights anybody vouches for.
        """
        if self._engine is None:
            raise EngineStateError(
                f"shard {self.shard} has no engine; call load_and_start() before generating"
            )
        if self._version is None:
            raise EngineStateError(
                f"shard {self.shard} waits for its first refit and serves nothing before; refit it"
            )
        return self._label
