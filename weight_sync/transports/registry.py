"""Names of transports and how their engine side is made."""

from __future__ import annotations

import torch

from weight_sync.errors import ConfigError
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.transports.base import ReceiverTransport

TRANSPORTS = ("ipc",)


def check_transport(name: str) -> None:
    """Refuses unknown names.

    Raises:
        ConfigError: Listing the known ones.
    """
    if name not in TRANSPORTS:
        raise ConfigError(f"unknown transport {name!r}; known: {', '.join(TRANSPORTS)}")


def make_receiver(
    name: str, device: torch.device, peers: dict[int, TrainerPeer]
) -> ReceiverTransport:
    """The engine side of a transport."""
    check_transport(name)
    from weight_sync.transports.ipc import IpcReceiver

    return IpcReceiver(device, peers)
