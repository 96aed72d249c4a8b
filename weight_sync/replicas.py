"""Owners of one region must hold equal bytes; checked before anything live changes."""

from __future__ import annotations

import numpy as np

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import ReplicaMismatchError, shorten
from weight_sync.messages import Digests, GetReplicaDigests
from weight_sync.participants import TrainerRanks
from weight_sync.plan import Plan


def check_replicas(plan: Plan, trainers: TrainerRanks, version: int, deadline: Deadline) -> None:
    """Compares the digests of every region that several ranks own.

    Raises:
        ReplicaMismatchError: Naming tensors and ranks.
    """
    regions = plan.regions
    first = regions.owner_first
    shared = np.flatnonzero(np.diff(first) > 1)
    if not len(shared):
        return
    owners = {
        g: list(
            zip(
                regions.owner_rank[first[g] : first[g + 1]].tolist(),
                regions.owner_region[first[g] : first[g + 1]].tolist(),
                strict=True,
            )
        )
        for g in shared.tolist()
    }
    ranks = sorted({rank for pairs in owners.values() for rank, _ in pairs})
    replies = trainers.ask(
        lambda _: GetReplicaDigests(version),
        Digests,
        deadline,
        "publish",
        version=version,
        epoch=plan.membership.epoch,
        ranks=ranks,
    )
    sums = {rank: reply.values.unpack() for rank, reply in replies.items()}
    bad = [
        f"{plan.catalogue.tensors[int(regions.tensor[g])].name} "
        f"(trainer ranks {[rank for rank, _ in pairs]})"
        for g, pairs in owners.items()
        if len({int(sums[rank][number]) for rank, number in pairs}) > 1
    ]
    if bad:
        raise ReplicaMismatchError(
            f"replicas hold different bytes in version {version}: {shorten(bad)}. Nothing was "
            "changed in any engine. Make the ranks agree (broadcast the parameter) and try again."
        )
