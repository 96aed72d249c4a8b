"""Makes everything that would gather a sharded parameter raise, inside a trainer rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor

from tests.harness.trainers import Rank

_FUNCTIONS = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_gather_object",
    "all_gather_coalesced",
    "gather",
    "gather_object",
    "all_reduce",
    "broadcast",
    "all_to_all",
    "all_to_all_single",
)


class GatheredError(Exception):
    """A collective was started while refits must not need one."""


def _refusing(name: str) -> object:
    def refuse(*args: object, **kwargs: object) -> None:
        raise GatheredError(f"{name} was called during a refit")

    return refuse


def forbid_gathers(rank: Rank) -> None:
    """Patches DTensor, torch.distributed and its functional form for the rest of the process.

    The process group goes too, so that a collective no patch covers cannot run either.
    """
    for name in ("full_tensor", "redistribute"):
        setattr(DTensor, name, _refusing(name))
    for name in _FUNCTIONS:
        if hasattr(dist, name):
            setattr(dist, name, _refusing(name))
            setattr(dist.distributed_c10d, name, _refusing(name))
    for name in [n for n in dir(functional) if n.startswith(("all_gather", "all_reduce"))]:
        setattr(functional, name, _refusing(name))
    dist.destroy_process_group()


def gather_one(rank: Rank) -> torch.Tensor:
    """What the patch must catch."""
    parameter = next(rank.module.parameters())
    return parameter.full_tensor()
