"""Health and repair of the fleet: liveness, a shard's machine, replacing a shard."""

from __future__ import annotations

import logging
from collections.abc import Callable

import ray

from generation.answers import values_or_raise
from generation.capture import CaptureSink
from generation.fleet import GenerationFleetHealth, ShardState
from generation.fleet_base import FleetBase
from generation.pause import USER
from generation.selector import HealthyShardSelector
from weight_sync.errors import EngineStateError

logger = logging.getLogger("generation.vllm_generation")


class FleetCalls(FleetBase):
    """Fleet health of the facade."""

    _urls: list[str | None]
    _make_sink: Callable[[int], CaptureSink] | None = None
    _label: int | None = None

    def attach_fleet_health(
        self, monitor: GenerationFleetHealth, selector: HealthyShardSelector
    ) -> None:
        """Follows a monitor and a selector: requests, refits and failures go by them.

        Raises:
            GenerationConfigError: The monitor watches another number of shards.
        """
        self.roster.attach(monitor, selector)

    def shard_liveness_ref(self, shard: int) -> ray.ObjectRef:
        """Returns a reference that resolves to True if and only if the shard's engine is alive.

        Waiting for it raises ``RayActorError`` for a dead actor, ``EngineDeadError`` for a dead
        engine behind a living one.
        """
        return self.pool.leader(shard).is_alive.remote()

    def log_shard_gpu_state(self, shard: int, *, label: str, timeout_s: float = 30.0) -> str:
        """Logs the shard's processes and the GPUs of its machine, seen from outside the shard.

        Shows an engine that lives on without its actor and holds the memory a replacement needs.

        Returns:
            What was logged. Never raises; a machine that does not answer is what is logged then.
        """
        try:
            state = self.pool.look_at_node(shard, timeout_s)
        except Exception as error:  # a look that fails must not stop whoever repairs the shard
            text = f"{label}: shard {shard}: its machine did not answer: {error!r}"
        else:
            processes = ", ".join(f"{pid} {name}" for pid, name in state.processes.items())
            gpus = "; ".join(state.gpus) or "no GPU tool"
            text = (
                f"{label}: shard {shard}: processes [{processes}]; GPU index, used, total: {gpus}; "
                f"GPU, process, used: {'; '.join(state.gpu_processes) or 'none'}"
            )
        logger.info("%s", text)
        return text

    def restart_shard(self, shard: int) -> str | None:
        """Replaces one shard: ends what is left of it, starts a new engine in the same place.

        Blocking and slow. The new engine holds old weights and serves nothing before its first
        verified refit. Token capture, weight version and a pause that
        somebody holds are applied again.

        Returns:
            Its new HTTP address for the caller to publish, or None when it serves no HTTP.

        Raises:
            EngineStateError: The shard does not exist, its restarts are used up, a process of it
                does not end, or the new engine does not start.
        """
        if shard not in self.pool.shards:
            raise EngineStateError(
                f"shard {shard} cannot be replaced; the fleet has {list(self.pool.shards)}"
            )
        mine = self._mark_restarting(shard)
        self.roster.died(shard, "restarting")
        self.log_shard_gpu_state(shard, label="before restart", timeout_s=self.limits.call_s)
        try:
            self.pool.recreate(shard)
            self.pool.load([shard])
            url = self._revive(shard)
        except BaseException as error:
            if mine and self.roster.monitor is not None:
                self.roster.monitor.mark_restart_failed(shard, error)
            raise
        self._urls[self.pool.shards.index(shard)] = url
        self.refits.replaced(shard)
        self.roster.restarted(shard)
        if mine and self.roster.monitor is not None:
            self.roster.monitor.mark_loaded(shard, url)
        return url

    def _mark_restarting(self, shard: int) -> bool:
        """Counts the restart, unless a supervisor did; returns whether this call did."""
        monitor = self.roster.monitor
        if monitor is None or monitor.state_of(shard) is ShardState.RESTARTING:
            return False
        monitor.record_actor_death(shard, "replaced on request")
        if not monitor.mark_restarting(shard):
            raise EngineStateError(
                f"shard {shard} is {monitor.state_of(shard)} and is not restarted any more; see "
                "its last errors, or raise max_restart_attempts_per_shard"
            )
        return True

    def _revive(self, shard: int) -> str | None:
        limit = self.limits.call_s
        if self._make_sink is not None:
            values_or_raise(
                self.pool.ask([shard], "install_capture", self._make_sink, timeout_s=limit)
            )
        if self._held:
            values_or_raise(self.pool.ask([shard], "pause", USER, True, timeout_s=limit))
        if self._label is not None:
            values_or_raise(self.pool.ask([shard], "set_label", self._label, timeout_s=limit))
        found: dict[int, str | None] = values_or_raise(
            self.pool.ask([shard], "base_url", timeout_s=limit)
        )
        return found[shard]
