"""Keeps a fleet in service: counts outcomes, probes, restarts what died, tells the router.

One ``tick`` after another is all a controller has to do between refits; nothing in it blocks longer
than the probes' deadline.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Protocol

import ray

from generation.answers import gather
from generation.fleet import ABSENT_STATES, GenerationFleetHealth
from generation.router import GenerationRouter
from generation.router_pool import Outcomes
from generation.supervisor import EngineSupervisor

logger = logging.getLogger(__name__)


class Fleet(Protocol):
    """What is kept."""

    def shard_liveness_ref(self, shard: int) -> ray.ObjectRef:
        """Returns a reference that resolves if the shard lives."""
        ...


class FleetKeeper:
    """Turns outcomes and probes into health, and health into restarts and routes.

    Args:
        fleet: The fleet.
        monitor: Its health, attached to it.
        supervisor: Restarts dead shards; None leaves them dead.
        router: Gets the serving addresses after every tick.
        probe_timeout_s: Deadline of one round of probes, seconds.
    """

    def __init__(
        self,
        fleet: Fleet,
        monitor: GenerationFleetHealth,
        *,
        supervisor: EngineSupervisor | None = None,
        router: GenerationRouter | None = None,
        probe_timeout_s: float = 10.0,
    ) -> None:
        self._fleet = fleet
        self._monitor = monitor
        self._supervisor = supervisor
        self._router = router
        self._probe_timeout_s = probe_timeout_s

    def tick(self) -> list[int]:
        """Does one round; returns the shards whose restart started now."""
        if self._router is not None:
            report_outcomes(self._monitor, self._router.drain_outcomes())
        self._probe()
        started = self._supervisor.tick() if self._supervisor is not None else []
        if self._router is not None:
            self._router.set_backends(self._monitor.serving_base_urls())
        return started

    def _probe(self) -> None:
        present = [s.shard for s in self._monitor.snapshot() if s.state not in ABSENT_STATES]
        refs = {shard: self._fleet.shard_liveness_ref(shard) for shard in present}
        answers = gather(refs, "probe", self._probe_timeout_s)
        for shard, answer in answers.items():
            if answer.dead:
                self._monitor.record_actor_death(shard, str(answer.error))
            else:
                self._monitor.record_probe(shard, ok=answer.yes, error=str(answer.error or ""))


def report_outcomes(monitor: GenerationFleetHealth, outcomes: Mapping[str, Outcomes]) -> None:
    """Tells a monitor how requests through a router came out, by backend address."""
    for url, outcome in outcomes.items():
        shard = monitor.shard_for_base_url(url)
        if shard is None:  # the address of an engine that was replaced since
            continue
        if outcome.succeeded:  # before the failures: those are the ones after it
            monitor.report_success(shard)
        for _ in range(outcome.failures):
            monitor.report_failure(shard, f"the router got no good answer from {url}")
