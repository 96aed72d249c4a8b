"""Names of transports and how their engine side is made."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weight_sync.errors import ConfigError
from weight_sync.faults import FaultHook
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.transports.base import ReceiverTransport

TRANSPORTS = ("ipc", "broadcast", "reshard")
# Those that move bytes through groups of trainer ranks and workers.
GROUPED = ("broadcast", "reshard")


Factory = Callable[[torch.device, dict[int, TrainerPeer]], ReceiverTransport]
_registered: dict[str, Factory] = {}


def register_transport(name: str, receiver: Factory) -> None:
    """Adds a transport that needs no groups, in this process; its workers must do the same.

    Args:
        name: What ``WeightSynchronizer(transport=...)`` calls it.
        receiver: Makes the engine side.
    """
    _registered[name] = receiver


def check_transport(name: str) -> None:
    """Refuses unknown names.

    Raises:
        ConfigError: Listing the known ones.
    """
    known = (*TRANSPORTS, *_registered)
    if name not in known:
        raise ConfigError(f"unknown transport {name!r}; known: {', '.join(known)}")


def make_receiver(
    name: str, device: torch.device, peers: dict[int, TrainerPeer], fault: FaultHook
) -> ReceiverTransport:
    """The engine side of a transport."""
    check_transport(name)
    if name in _registered:
        return _registered[name](device, peers)
    if name in GROUPED:
        from weight_sync.transports.staging import StagedReceiver

        return StagedReceiver(device, peers, fault)
    from weight_sync.transports.ipc import IpcReceiver

    return IpcReceiver(device, peers)
