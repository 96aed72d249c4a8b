"""Which shards of the fleet may be handed requests, and why the others may not.

A pure state machine: probing, restarting and pushing addresses belong to its callers. The rule that
matters most is a transition that does not exist: a shard that left service comes back only through
a restart (or a failed refit), STALE, and one complete refit. An engine that merely answers again
holds weights nobody vouches for.

    HEALTHY <-> SUSPECT -> DEAD -> RESTARTING -> STALE -> (refit) -> HEALTHY
        any serving shard -> STALE   when a refit ended after its first byte
        DEAD -> RETIRED              when its restarts are used up
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence

from generation.errors import GenerationConfigError, GenerationFleetExhausted
from weight_sync.errors import EngineStateError

logger = logging.getLogger(__name__)


class ShardState(enum.StrEnum):
    """Life of one shard."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    RETIRED = "retired"


SERVING_STATES = frozenset({ShardState.HEALTHY, ShardState.SUSPECT})
ABSENT_STATES = frozenset({ShardState.DEAD, ShardState.RESTARTING, ShardState.RETIRED})


@dataclasses.dataclass(frozen=True)
class FleetHealthPolicy:
    """Thresholds, all at least 1.

    Attributes:
        unhealthy_threshold: Failures in a row (of probes, or of requests) that make a shard DEAD.
        healthy_threshold: Good probes in a row that clear a suspicion.
        max_restart_attempts_per_shard: Restarts over the life of a shard before it is RETIRED.
        min_healthy_shards: Fewer serving shards than this end the run.
    """

    unhealthy_threshold: int = 3
    healthy_threshold: int = 2
    max_restart_attempts_per_shard: int = 5
    min_healthy_shards: int = 1

    def __post_init__(self) -> None:
        """Raises GenerationConfigError listing every threshold below 1."""
        wrong = [
            f"{field.name} must be at least 1, got {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) < 1
        ]
        if wrong:
            raise GenerationConfigError("fleet health policy", wrong)


@dataclasses.dataclass(frozen=True)
class ShardHealth:
    """What is known about one shard; a snapshot that never changes.

    ``probe_failures`` and ``reported_failures`` are separate streaks: a wedged engine answers every
    probe, so a good probe must not forgive failed requests.
    """

    shard: int
    base_url: str | None = None
    state: ShardState = ShardState.HEALTHY
    probe_failures: int = 0
    probe_successes: int = 0
    reported_failures: int = 0
    restart_attempts: int = 0
    suspect_before_stale: bool = False
    weight_version: int = 0
    last_ok_at: float = 0.0
    last_error: str = ""


class GenerationFleetHealth:
    """Health of every shard, safe to use from several threads.

    Args:
        shard_count: Number of shards, at least 1.
        policy: Thresholds.
        base_urls: Address of each shard's server, or None where it has none.
        clock: Monotonic seconds.

    Raises:
        GenerationConfigError: No shard, or another number of addresses.
    """

    def __init__(
        self,
        shard_count: int,
        policy: FleetHealthPolicy | None = None,
        base_urls: Sequence[str | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        urls = [None] * shard_count if base_urls is None else list(base_urls)
        if shard_count < 1 or len(urls) != shard_count:
            raise GenerationConfigError(
                "fleet health", [f"{shard_count} shards with {len(urls)} base_urls"]
            )
        self.policy = policy or FleetHealthPolicy()
        self._clock = clock
        self._lock = threading.RLock()
        self._shards = [
            ShardHealth(i, base_url=urls[i], last_ok_at=clock()) for i in range(len(urls))
        ]
        self._epoch = 0

    @property
    def shard_count(self) -> int:
        """Number of shards, absent ones included."""
        return len(self._shards)

    @property
    def membership_epoch(self) -> int:
        """Grows by one whenever the set of serving shards changes."""
        return self._epoch

    def snapshot(self) -> tuple[ShardHealth, ...]:
        """Returns the health of every shard, by index."""
        with self._lock:
            return tuple(self._shards)

    def state_of(self, shard: int) -> ShardState:
        """Returns the state of one shard."""
        return self._shards[shard].state

    def serving_shards(self) -> list[int]:
        """Returns the shards that may be handed requests: HEALTHY and SUSPECT."""
        return [s.shard for s in self.snapshot() if s.state in SERVING_STATES]

    def absent_shards(self) -> list[int]:
        """Returns the shards that take no part in a refit; STALE ones do take part."""
        return [s.shard for s in self.snapshot() if s.state in ABSENT_STATES]

    def serving_base_urls(self) -> list[str]:
        """Returns the addresses of the serving shards, the full set a router needs."""
        serving = [s for s in self.snapshot() if s.state in SERVING_STATES]
        return [s.base_url for s in serving if s.base_url is not None]

    def shard_for_base_url(self, base_url: str) -> int | None:
        """Returns the shard behind an address, for failures that a router counted."""
        return next((s.shard for s in self.snapshot() if s.base_url == base_url), None)

    def as_metrics(self) -> dict[str, float]:
        """Returns shard counts by state, the epoch, and each shard's version and restarts."""
        shards = self.snapshot()
        metrics = {"fleet/membership_epoch": float(self._epoch)}
        for state in ShardState:
            metrics[f"fleet/shards/{state}"] = float(sum(s.state is state for s in shards))
        for s in shards:
            metrics[f"fleet/weight_version/{s.shard}"] = float(s.weight_version)
            metrics[f"fleet/restart_attempts/{s.shard}"] = float(s.restart_attempts)
        return metrics

    def raise_if_exhausted(self) -> None:
        """Raises GenerationFleetExhausted when fewer than the minimum number of shards serve."""
        serving = len(self.serving_shards())
        if serving < self.policy.min_healthy_shards:
            states = ", ".join(
                f"{s.shard}: {s.state} {s.last_error}".strip() for s in self.snapshot()
            )
            raise GenerationFleetExhausted(
                f"{serving} shards serve, at least {self.policy.min_healthy_shards} are needed "
                f"({states}); see the shards' logs, or lower min_healthy_shards"
            )

    def record_probe(self, shard: int, *, ok: bool, error: str = "") -> None:
        """Takes one probe result of a serving or STALE shard; a good one never promotes STALE."""
        with self._lock:
            now = self._shards[shard]
            if now.state in ABSENT_STATES:
                return
            if ok:
                good = now.probe_successes + 1
                cleared = (
                    now.state is ShardState.SUSPECT
                    and good >= self.policy.healthy_threshold
                    and now.reported_failures == 0
                )
                self._set(
                    shard,
                    ShardState.HEALTHY if cleared else now.state,
                    probe_failures=0,
                    probe_successes=good,
                    last_ok_at=self._clock(),
                )
                return
            failures = now.probe_failures + 1
            state = self._after_failure(now.state, failures)
            self._set(shard, state, probe_failures=failures, probe_successes=0, last_error=error)

    def report_failure(self, shard: int, error: BaseException | str) -> None:
        """Takes one failed request; only a successful request ends this streak."""
        with self._lock:
            now = self._shards[shard]
            if now.state not in SERVING_STATES:
                return
            text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
            failures = now.reported_failures + 1
            state = self._after_failure(now.state, failures)
            self._set(shard, state, reported_failures=failures, last_error=text)

    def report_success(self, shard: int) -> None:
        """Takes one successful request; ends the streak of failed ones."""
        with self._lock:
            self._set(shard, self._shards[shard].state, reported_failures=0)

    def record_actor_death(self, shard: int, error: str = "actor died") -> None:
        """Takes conclusive evidence of death: DEAD at once, whatever the streaks say."""
        with self._lock:
            if self._shards[shard].state not in ABSENT_STATES:
                self._set(shard, ShardState.DEAD, last_error=error)

    def mark_weights_partial(self, shard: int) -> None:
        """Takes a serving shard out after a refit that ended between its first byte and commit."""
        with self._lock:
            now = self._shards[shard]
            if now.state in SERVING_STATES:
                suspect = now.state is ShardState.SUSPECT
                self._set(shard, ShardState.STALE, suspect_before_stale=suspect)

    def mark_restarting(self, shard: int) -> bool:
        """Counts one restart of a DEAD shard.

        Returns:
            Whether it is RESTARTING now. It is not when its restarts are used up (it is RETIRED
            then), or when it was not DEAD.
        """
        with self._lock:
            now = self._shards[shard]
            if now.state is not ShardState.DEAD:
                return False
            limit = self.policy.max_restart_attempts_per_shard
            if now.restart_attempts >= limit:
                self.retire(shard, f"{limit} restarts used up, last error: {now.last_error}")
                return False
            self._set(shard, ShardState.RESTARTING, restart_attempts=now.restart_attempts + 1)
            return True

    def mark_restart_failed(self, shard: int, error: BaseException | str) -> None:
        """Takes a restart that failed: RESTARTING becomes DEAD, to be tried again."""
        with self._lock:
            if self._shards[shard].state is ShardState.RESTARTING:
                self._set(shard, ShardState.DEAD, last_error=str(error))

    def mark_loaded(self, shard: int, base_url: str | None = None) -> None:
        """Takes a restart that succeeded: STALE until a refit, at its new address.

        A late answer for a shard that was retired meanwhile changes nothing.
        """
        with self._lock:
            if self._shards[shard].state is ShardState.RESTARTING:
                self._set(
                    shard,
                    ShardState.STALE,
                    base_url=base_url,
                    probe_failures=0,
                    probe_successes=0,
                    reported_failures=0,
                    suspect_before_stale=False,
                )

    def report_refit(self, shard: int, *, weight_version: int) -> bool:
        """Takes a complete, verified refit; the only way from STALE into service.

        Returns:
            Whether the shard serves now. A shard that died meanwhile does not.

        Raises:
            EngineStateError: The version is older than the one the shard was refitted to before.
        """
        with self._lock:
            now = self._shards[shard]
            if now.state in ABSENT_STATES:
                logger.warning("shard %d is %s, its refit does not count", shard, now.state)
                return False
            if weight_version < now.weight_version:
                raise EngineStateError(
                    f"shard {shard} holds weight version {now.weight_version}, version "
                    f"{weight_version} would go back; continue the trainer's version numbering"
                )
            state = now.state
            if state is ShardState.STALE:
                state = ShardState.SUSPECT if now.suspect_before_stale else ShardState.HEALTHY
            self._set(
                shard,
                state,
                weight_version=weight_version,
                suspect_before_stale=False,
                last_ok_at=self._clock(),
            )
            return True

    def retire(self, shard: int, reason: str) -> None:
        """Takes a shard out for good."""
        with self._lock:
            self._set(shard, ShardState.RETIRED, last_error=reason)

    def _after_failure(self, state: ShardState, failures: int) -> ShardState:
        if failures >= self.policy.unhealthy_threshold:
            return ShardState.DEAD
        return ShardState.SUSPECT if state is ShardState.HEALTHY else state

    def _set(self, shard: int, state: ShardState, **changes: object) -> None:
        before = self._shards[shard]
        after = dataclasses.replace(before, state=state, **changes)  # type: ignore[arg-type]
        self._shards[shard] = after
        if state is not before.state:
            logger.warning("shard %d: %s -> %s %s", shard, before.state, state, after.last_error)
        if (state in SERVING_STATES) != (before.state in SERVING_STATES):
            self._epoch += 1
