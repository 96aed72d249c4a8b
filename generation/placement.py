"""Which bundles of a cluster belong to which shard; pure, the cluster itself is a Protocol.

A bundle is the place of one worker. A shard's ``tp * pp`` bundles are neighbours: first by node,
then by their order on the node, so that a shard spans as few nodes as possible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from generation.errors import GenerationConfigError


@dataclasses.dataclass(frozen=True, order=True)
class Bundle:
    """One worker's place: its node, its placement group and its index in that group."""

    node: int
    group: int
    index: int


class Placement(Protocol):
    """A cluster that can be asked for placement groups."""

    @property
    def bundles_per_node(self) -> tuple[int, ...]:
        """Bundles of each node."""
        ...

    @property
    def gpus_per_bundle(self) -> float:
        """GPUs of one bundle; 0 on a CPU cluster."""
        ...

    def init_placement_groups(self, *, unified: bool, timeout_s: float) -> None:
        """Creates the placement groups, in node order; does nothing when they exist."""
        ...

    def bundles(self) -> tuple[Bundle, ...]:
        """Returns all bundles; empty before the placement groups exist."""
        ...

    def scheduling_options(self, bundle: Bundle) -> dict[str, Any]:
        """Returns the options that place an actor on a bundle."""
        ...

    def node_options(self, bundle: Bundle) -> dict[str, Any]:
        """Returns the options that run a task on the bundle's node without taking its resources."""
        ...


@dataclasses.dataclass(frozen=True)
class ShardPlace:
    """The bundles of one shard, the leader's first.

    Attributes:
        shard: Number of the shard.
        node: Node of the leader.
        bundles: ``tp * pp`` bundles.
    """

    shard: int
    node: int
    bundles: tuple[Bundle, ...]

    @property
    def spans_nodes(self) -> bool:
        """Whether the shard's workers are on more than one node."""
        return len({bundle.node for bundle in self.bundles}) > 1


def usable_bundles_per_node(
    bundles_per_node: Sequence[int], workers_per_node: int | Sequence[int] | None
) -> tuple[int, ...]:
    """How many bundles of each node are used.

    Raises:
        GenerationConfigError: More workers than a node has bundles, or another number of nodes.
    """
    if workers_per_node is None:
        return tuple(bundles_per_node)
    wanted = (
        [workers_per_node] * len(bundles_per_node)
        if isinstance(workers_per_node, int)
        else list(workers_per_node)
    )
    if len(wanted) != len(bundles_per_node) or any(
        not 0 <= want <= have for want, have in zip(wanted, bundles_per_node, strict=False)
    ):
        raise GenerationConfigError(
            "workers_per_node",
            [f"{wanted} workers do not fit a cluster with {list(bundles_per_node)} bundles"],
        )
    return tuple(wanted)


def needs_one_group(bundles_per_node: Sequence[int], shard_width: int) -> bool:
    """Whether a shard is wider than a node, so that one placement group must span the nodes."""
    return shard_width > max(bundles_per_node, default=0)


def place_shards(
    bundles: Sequence[Bundle], shard_width: int, workers_per_node: Sequence[int]
) -> tuple[ShardPlace, ...]:
    """Cuts the bundles into shards of ``shard_width`` neighbours.

    Where a shard fits on a node it never spans two: bundles that are left over on a node stay
    unused.

    Raises:
        ValueError: No bundles, or not enough of them for one shard.
    """
    if not bundles:
        raise GenerationConfigError(
            "placement", ["the cluster has no placement groups; call init_placement_groups() first"]
        )
    taken = dict.fromkeys(range(len(workers_per_node)), 0)
    per_node: dict[int, list[Bundle]] = {node: [] for node in taken}
    for bundle in sorted(bundles):
        if taken[bundle.node] < workers_per_node[bundle.node]:
            taken[bundle.node] += 1
            per_node[bundle.node].append(bundle)
    if needs_one_group(workers_per_node, shard_width):
        lists = [[bundle for node in sorted(per_node) for bundle in per_node[node]]]
    else:
        lists = [per_node[node] for node in sorted(per_node)]
    places: list[ShardPlace] = []
    for row in lists:
        for first in range(0, len(row) - shard_width + 1, shard_width):
            chosen = tuple(row[first : first + shard_width])
            places.append(ShardPlace(len(places), chosen[0].node, chosen))
    if not places:
        raise GenerationConfigError(
            "placement",
            [
                f"cannot place one shard of {shard_width} workers (tensor_parallel_size * "
                f"pipeline_parallel_size) on nodes with {list(workers_per_node)} workers"
            ],
        )
    return tuple(places)
