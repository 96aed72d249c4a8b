"""checkpoint-engine's side of the trainer: a parameter server of one rank on the engine's GPU."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import torch
from checkpoint_engine.ps import ParameterServer
from loguru import logger

_CHECKPOINT = "weights"


class Server:
    """A parameter server whose process group stays, so that refits do not pay for it."""

    def __init__(self) -> None:
        # It logs every bucket of every update.
        logger.disable("checkpoint_engine")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        self._server = ParameterServer(auto_pg=False, master_port=port)
        self._server.init_process_group()

    def update(
        self, tensors: dict[str, torch.Tensor], announce: Callable[[dict[str, str]], None]
    ) -> None:
        """Registers weights, copies them to pinned memory, and serves them to the engine.

        Args:
            tensors: Checkpoint name -> weight.
            announce: Gets the socket path of every GPU once workers may connect.
        """
        server = self._server
        server.register_checkpoint(_CHECKPOINT, named_tensors=tensors, use_shared_memory_pool=True)
        server.gather_metas(_CHECKPOINT)
        server.update(_CHECKPOINT, lambda paths: announce(dict(paths)))
        server.unregister_checkpoint(_CHECKPOINT)
