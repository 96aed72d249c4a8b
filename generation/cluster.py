"""A Ray cluster as the facade sees it: placement groups made in a set order, once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from generation.errors import GenerationConfigError
from generation.placement import Bundle
from weight_sync.errors import EngineStateError


class RayCluster:
    """Reserves bundles for workers, one placement group per node or one over all of them.

    Args:
        bundles_per_node: Bundles to reserve on each node; a bundle is one worker's place.
        gpus_per_bundle: GPUs of a bundle, 0 for CPU engines.
        cpus_per_bundle: CPUs of a bundle.
        name: Prefix of the placement groups' names.

    Raises:
        GenerationConfigError: No node, or one with fewer than one bundle.
    """

    def __init__(
        self,
        bundles_per_node: Sequence[int],
        *,
        gpus_per_bundle: float = 1.0,
        cpus_per_bundle: float = 1.0,
        name: str = "generation",
    ) -> None:
        if not bundles_per_node or min(bundles_per_node) < 1:
            raise GenerationConfigError(
                "cluster", [f"every node needs at least one bundle, got {list(bundles_per_node)}"]
            )
        self.bundles_per_node = tuple(bundles_per_node)
        self.gpus_per_bundle = gpus_per_bundle
        self._cpus = cpus_per_bundle
        # Ray knows groups by name, and two fleets of one cluster may have the same prefix.
        self._name = f"{name}-{secrets.token_hex(4)}"
        self._groups: list[PlacementGroup] = []
        self._bundles: tuple[Bundle, ...] = ()
        self._node_ids: dict[Bundle, str] = {}

    def init_placement_groups(self, *, unified: bool, timeout_s: float) -> None:
        """Creates the placement groups one after the other; idempotent.

        The next group is asked for when the one before was granted, so that the order in which
        nodes are claimed does not depend on chance.

        Args:
            unified: One group over all nodes, for shards that are wider than a node.
            timeout_s: Deadline for all of them.

        Raises:
            EngineStateError: The cluster cannot grant them in time; nothing stays reserved.
        """
        if self._groups:
            return
        resources = {"CPU": self._cpus}
        if self.gpus_per_bundle:
            resources["GPU"] = self.gpus_per_bundle
        shapes = [sum(self.bundles_per_node)] if unified else list(self.bundles_per_node)
        for number, count in enumerate(shapes):
            group = placement_group(
                [dict(resources) for _ in range(count)],
                strategy="PACK" if unified else "STRICT_PACK",
                name=f"{self._name}-{number}",
            )
            self._groups.append(group)
            try:
                ray.get(group.ready(), timeout=timeout_s)
            except ray.exceptions.GetTimeoutError as error:
                self.shutdown()
                raise EngineStateError(
                    f"the Ray cluster did not grant placement group {number} ({count} bundles of "
                    f"{resources}) within {timeout_s:g} s; free resources or ask for fewer workers"
                ) from error
        self._read_bundles()

    def _read_bundles(self) -> None:
        nodes: dict[str, int] = {}
        found: list[Bundle] = []
        for number, group in enumerate(self._groups):
            where: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
            for index in sorted(where, key=lambda i: (where[i], i)):
                # A node of the configuration, not a machine: two of them may share one machine.
                key = where[index] if len(self._groups) == 1 else str(number)
                bundle = Bundle(nodes.setdefault(key, len(nodes)), number, index)
                found.append(bundle)
                self._node_ids[bundle] = where[index]
        if len(self._groups) == 1 and len(self.bundles_per_node) > 1:
            counts = tuple(sum(b.node == node for b in found) for node in range(len(nodes)))
            self.bundles_per_node = counts
        self._bundles = tuple(sorted(found))

    def bundles(self) -> tuple[Bundle, ...]:
        """Returns all bundles in node order; empty before the placement groups exist."""
        return self._bundles

    def scheduling_options(self, bundle: Bundle) -> dict[str, Any]:
        """Returns the Ray actor options that place one worker on a bundle."""
        return {
            "num_cpus": self._cpus,
            "num_gpus": self.gpus_per_bundle,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._groups[bundle.group],
                placement_group_bundle_index=bundle.index,
                placement_group_capture_child_tasks=True,
            ),
        }

    def node_options(self, bundle: Bundle) -> dict[str, Any]:
        """Returns the Ray task options that run on a bundle's node and take nothing of it."""
        return {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(
                self._node_ids[bundle], soft=False
            ),
        }

    def shutdown(self) -> None:
        """Gives the placement groups back; safe twice."""
        groups, self._groups, self._bundles = self._groups, [], ()
        for group in groups:
            remove_placement_group(group)
