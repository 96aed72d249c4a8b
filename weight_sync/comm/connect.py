"""Builds the group that fits a device: NCCL for GPUs, gloo for the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weight_sync.comm.base import Communicator
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.rendezvous import Rendezvous

if TYPE_CHECKING:
    import torch


def connect(
    rendezvous: Rendezvous,
    rank: int,
    names: Sequence[str],
    device: torch.device,
    deadline: Deadline,
) -> Communicator:
    """Builds this rank's end of a group on ``device``; every rank of ``names`` must call it.

    A rebuild is a new call: abort the old communicators on every rank, open a new rendezvous with
    the next epoch, connect, then close the old communicators and their rendezvous.

    Raises:
        WeightSyncError: As :func:`~weight_sync.comm.gloo.connect_gloo` and
            :func:`~weight_sync.comm.nccl.connect_nccl` document.
    """
    if device.type == "cuda":
        from weight_sync.comm.nccl import connect_nccl

        return connect_nccl(rendezvous, rank, names, device, deadline)
    from weight_sync.comm.gloo import connect_gloo

    return connect_gloo(rendezvous, rank, names, deadline)
