"""Before any plan: engines say what they want quantized, trainers obey, the offer is checked."""

from __future__ import annotations

from collections.abc import Sequence

from weight_sync.comm.deadline import Deadline
from weight_sync.manifest import Manifest, build_catalogue
from weight_sync.membership import Membership
from weight_sync.messages import GetWanted, Wanted
from weight_sync.participants import Shards, TrainerRanks, raise_shards
from weight_sync.quantize.negotiate import check_offer
from weight_sync.quantize.wanted import QuantSpec, unite_shards


def negotiate(
    trainers: TrainerRanks,
    offered: Sequence[Manifest],
    shards: Shards,
    membership: Membership,
    deadline: Deadline,
) -> tuple[list[Manifest], tuple[QuantSpec, ...]]:
    """Agrees on what travels quantized; nothing live is touched.

    Args:
        trainers: All trainer ranks.
        offered: What they hold themselves, in rank order.
        shards: All shards, of which those of the membership are asked.
        membership: Who takes part.
        deadline: For all of it.

    Returns:
        What trainer ranks serve from now on, in rank order, and what engines want quantized.

    Raises:
        QuantizationError: If shards want different things, a trainer cannot quantize as wanted, or
            what it offers is not what was asked for.
        LayoutError: If trainer ranks disagree.
    """
    offers = build_catalogue(offered).tensors
    replies, errors = shards.ask(
        dict.fromkeys(membership.shards, GetWanted(offers)),
        Wanted,
        deadline,
        "wanted",
        epoch=membership.epoch,
    )
    raise_shards(errors)
    wanted = unite_shards(
        {shard: [reply.specs for reply in workers] for shard, workers in replies.items()}
    )
    manifests = trainers.quantize(wanted, membership.epoch, deadline)
    check_offer(build_catalogue(manifests).tensors, wanted)
    return manifests, wanted
