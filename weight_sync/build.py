"""The steps that build an epoch: meet the workers, record, hand out the plan, attach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weight_sync.comm.deadline import Deadline
from weight_sync.manifest import Manifest, build_catalogue
from weight_sync.membership import Membership
from weight_sync.messages import (
    Attach,
    Attached,
    Done,
    Record,
    Recorded,
    SetProgram,
    Status,
    WorkerState,
)
from weight_sync.pairing import distances
from weight_sync.participants import Shards, TrainerRanks, raise_shards
from weight_sync.plan import Plan, build_plan
from weight_sync.wire.address import Address


def meet(
    shards: Shards, present: Sequence[int], deadline: Deadline
) -> dict[int, list[WorkerState]]:
    """Asks what workers hold already, e.g. of a trainer that died; states by shard.

    Raises:
        WeightSyncError: Naming who did not answer.
    """
    states, errors = shards.ask(dict.fromkeys(present, Status()), WorkerState, deadline, "plan")
    raise_shards(errors)
    return states


def record(
    shards: Shards,
    membership: Membership,
    manifests: Sequence[Manifest],
    not_trained: tuple[str, ...],
    deadline: Deadline,
) -> list[Recorded]:
    """Lets workers record what they read of the trainer's tensors; replies in worker order."""
    request = Record(build_catalogue(manifests).tensors, not_trained)
    replies, errors = shards.ask(
        dict.fromkeys(membership.shards, request),
        Recorded,
        deadline,
        "record",
        epoch=membership.epoch,
    )
    raise_shards(errors)
    return [reply for shard in membership.shards for reply in replies[shard]]


def make_plan(
    trainers: TrainerRanks,
    membership: Membership,
    manifests: Sequence[Manifest],
    recorded: Sequence[Recorded],
    bucket_bytes: int,
    not_trained: tuple[str, ...],
    deadline: Deadline,
) -> Plan:
    """Plans, and hands every trainer rank its part."""
    plan = build_plan(
        membership,
        manifests,
        [r.recording for r in recorded],
        cost=distances(
            [(m.host, m.device) for m in manifests], [(r.host, r.device) for r in recorded]
        ),
        bucket_bytes=bucket_bytes,
        not_trained=not_trained,
    )
    trainers.ask(
        lambda peer: SetProgram(plan.sender_program(peer.rank)),
        Done,
        deadline,
        "plan",
        epoch=membership.epoch,
    )
    return plan


@dataclass(frozen=True)
class Controls:
    """Where workers answer beside their engine's RPC.

    Attributes:
        addresses: Address and epoch by worker, e.g. ``"shard 1 worker 0"``. One of an earlier epoch
            may be closed because its worker has a new one since.
    """

    addresses: dict[str, tuple[Address, int]]

    def forget(self, shard: int) -> None:
        """Drops the addresses of a shard that was replaced."""
        for name in [n for n in self.addresses if n.startswith(f"shard {shard} ")]:
            del self.addresses[name]


def attach(
    shards: Shards,
    trainers: TrainerRanks,
    plan: Plan,
    transport: str,
    controls: Controls,
    deadline: Deadline,
) -> list[Attached]:
    """Hands every worker its part and connects it to the trainer; replies in worker order.

    Args:
        shards: The fleet.
        trainers: All trainer ranks.
        plan: The plan.
        transport: Name of the transport.
        controls: Gets the addresses of workers that answered, also if others did not.
        deadline: For all of it.
    """
    membership = plan.membership
    width = membership.workers_per_shard
    requests = {
        shard: Attach(
            tuple(plan.receiver_program(membership.prefix(shard) + i) for i in range(width)),
            trainers.infos,
            transport,
            deadline.inner(),
        )
        for shard in membership.shards
    }
    replies, errors = shards.ask(requests, Attached, deadline, "connect", epoch=membership.epoch)
    for shard, workers in replies.items():
        for reply in workers:
            name = membership.describe(membership.worker_index(shard, reply.worker))
            controls.addresses[name] = (reply.control, membership.epoch)
    raise_shards(errors)
    return [reply for shard in membership.shards for reply in replies[shard]]
