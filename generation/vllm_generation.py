"""The facade: a fleet of vLLM engines over Ray, built, driven, refitted and repaired as one thing.

It owns lifecycle and dispatch, never bytes: weights move between trainers and engine workers
through ``weight_sync``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from generation.answers import values_or_raise
from generation.config import VllmConfig
from generation.errors import FleetStateError, GenerationConfigError
from generation.generation_calls import GenerationCalls
from generation.lifecycle_calls import LifecycleCalls
from generation.limits import Limits
from generation.observability_calls import ObservabilityCalls
from generation.placement import (
    Placement,
    ShardPlace,
    needs_one_group,
    place_shards,
    usable_bundles_per_node,
)
from generation.refit_calls import RefitCalls
from generation.refit_driver import RefitDriver
from generation.roster import Roster
from generation.settings import (
    ControllerSettings,
    assert_reload_refit_config_supported,
    http_server_api_key_and_worker_config,
    resolve_generation_worker_cls,
    validate_settings,
)
from generation.telemetry import TelemetrySink, _record_vllm_generation_metrics
from generation.worker_pool import RayWorkerPool
from weight_sync.errors import ConfigError

logger = logging.getLogger(__name__)

__all__ = [
    "VllmGeneration",
    "_record_vllm_generation_metrics",
    "http_server_api_key_and_worker_config",
    "logger",
]

ASYNC_WORKER = "generation.async_actor.AsyncEngineActor"
SYNC_WORKER = "generation.sync_actor.SyncEngineActor"


class VllmGeneration(GenerationCalls, LifecycleCalls, RefitCalls, ObservabilityCalls):
    """DP shards of ``tp * pp`` workers each.

    Args:
        cluster: Grants placement groups.
        config: The fleet's config, or a plain mapping for one.
        name_prefix: Prefix of the actors' names.
        workers_per_node: Workers to use on each node (one number for all, or one per node); None
            for all bundles of the cluster.
        defer_model_load: Only create actors and reserve HTTP addresses; engines start with
            :meth:`load_and_start`.
        limits: Deadlines.
        telemetry: Takes the token counts of every call; None for none.

    Raises:
        GenerationConfigError: Lists every setting that cannot work; nothing was started.
        EngineStateError: The cluster does not grant the bundles, or an engine does not start;
            nothing stays reserved but the cluster's placement groups.
    """

    def __init__(
        self,
        cluster: Placement,
        config: VllmConfig | Mapping[str, Any],
        name_prefix: str = "vllm_policy",
        workers_per_node: int | Sequence[int] | None = None,
        defer_model_load: bool = False,
        *,
        limits: Limits | None = None,
        telemetry: TelemetrySink | None = None,
    ) -> None:
        self.config = config if isinstance(config, VllmConfig) else VllmConfig.from_dict(config)
        per_node = _check(cluster, self.config, workers_per_node)
        self.limits = limits or Limits()
        self.telemetry = telemetry
        self.cluster = cluster
        self.http_api_key, worker_config = http_server_api_key_and_worker_config(self.config)
        assert isinstance(worker_config, VllmConfig)
        self.init_cluster_placement_groups(cluster, self.config, timeout_s=self.limits.placement_s)
        places = place_shards(cluster.bundles(), self.config.engine_world_size, per_node)
        spanning = [place.shard for place in places if place.spans_nodes]
        if spanning:
            raise GenerationConfigError(
                "placement",
                [
                    f"shards {spanning} would span nodes; use nodes with at least "
                    f"{self.config.engine_world_size} bundles, or a smaller tensor_parallel_size * "
                    "pipeline_parallel_size"
                ],
            )
        default = ASYNC_WORKER if self.config.vllm_cfg.async_engine else SYNC_WORKER
        self.pool = RayWorkerPool(
            cluster,
            places,
            worker_config,
            resolve_generation_worker_cls(default, self.config),
            worker_environment(self.config),
            name_prefix,
            self.limits,
        )
        self.roster = Roster(self.pool.shards)
        self.refits = RefitDriver(self.pool, self.roster, self.limits)
        self._urls = [None] * len(places)
        self.device_uuids: list[list[str]] | None = None
        self._loaded = False
        try:
            # Dummy weights are noise until the first refit, so such engines serve nothing before.
            current = self.config.vllm_cfg.load_format != "dummy"
            self.pool.create(self.pool.shards, current=current)
            if defer_model_load:
                self._urls = self._collect_reserved_urls()
            else:
                self.load_and_start()
        except BaseException:
            self.shutdown()
            raise

    # --- set-up ---------------------------------------------------------------------------------

    @classmethod
    def validate_settings(cls, master_config: ControllerSettings) -> None:
        """Refuses settings that an asynchronous loop cannot honour; needs no device and no model.

        Raises:
            GenerationConfigError: Lists every violation.
        """
        validate_settings(master_config)

    @staticmethod
    def init_cluster_placement_groups(
        cluster: Placement, config: VllmConfig, timeout_s: float = Limits.placement_s
    ) -> None:
        """Creates the placement groups a fleet would create; idempotent.

        Lets this fleet claim its nodes before others do.
        """
        unified = needs_one_group(cluster.bundles_per_node, config.engine_world_size)
        cluster.init_placement_groups(unified=unified, timeout_s=timeout_s)

    def _get_tied_worker_bundle_indices(self, cluster: Placement) -> list[tuple[int, list[int]]]:
        """Returns (node, indices of its bundles) for every shard.

        Raises:
            GenerationConfigError: No placement groups, or not enough bundles for one shard.
        """
        width = self.config.engine_world_size
        places = place_shards(cluster.bundles(), width, cluster.bundles_per_node)
        return [(place.node, _indices(place)) for place in places]

    def load_and_start(self) -> None:
        """Loads all engines; after a deferred start, at the addresses reserved then.

        Raises:
            FleetStateError: The engines are loaded already.
            EngineStateError: One does not start.
        """
        if self._loaded:
            raise FleetStateError("the engines are loaded already; restart single shards instead")
        self.pool.load(self.pool.shards)
        self._loaded = True
        self._urls = self._report_dp_openai_server_base_urls()
        self.device_uuids = self._report_device_id()

    def _post_init(self) -> None:
        """Starts what needs a live engine on every shard; part of loading, idempotent."""
        values_or_raise(
            self.pool.ask(self.roster.alive(), "post_init", timeout_s=self.limits.load_s)
        )

    # --- addresses ------------------------------------------------------------------------------

    @property
    def dp_openai_server_base_urls(self) -> list[str | None]:
        """HTTP address of every shard, by shard; None where it serves none."""
        return list(self._urls)

    def _report_dp_openai_server_base_urls(self) -> list[str | None]:
        """Asks every shard for its HTTP address; None for each without a server."""
        answers = self.pool.ask(self.pool.shards, "base_url", timeout_s=self.limits.call_s)
        return [values_or_raise(answers)[shard] for shard in self.pool.shards]

    def _collect_reserved_urls(self) -> list[str | None]:
        """Returns the addresses that are bound already for servers that do not run yet."""
        return self._report_dp_openai_server_base_urls()

    # --- end ------------------------------------------------------------------------------------

    def shutdown(self) -> bool:
        """Ends engines, actors and every process of theirs; safe twice.

        Returns:
            True if nothing is left; shards that are dead count as ended.
        """
        pool = getattr(self, "pool", None)
        if pool is None:
            return True
        refits = getattr(self, "refits", None)
        if refits is not None:
            refits.close()
        return bool(pool.shutdown())

    def __del__(self) -> None:
        """Ends the fleet; a partly built one too."""
        with contextlib.suppress(Exception):
            self.shutdown()


def worker_environment(config: VllmConfig) -> dict[str, str]:
    """Environment of every worker; what the user set wins."""
    environment = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # vLLM's CPU platform would otherwise give every shard one more process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if not config.colocated:
        # Before the first communicator: without it vLLM switches it off for all that follow, and
        # peers of one host then take an older path that fails.
        environment["NCCL_CUMEM_ENABLE"] = "1"
    return environment | dict(config.vllm_cfg.env_vars)


def _check(
    cluster: Placement, config: VllmConfig, workers_per_node: int | Sequence[int] | None
) -> tuple[int, ...]:
    """Checks everything before anything is asked of the cluster; returns workers per node."""
    problems: list[str] = []
    per_node = tuple(cluster.bundles_per_node)
    try:
        per_node = usable_bundles_per_node(cluster.bundles_per_node, workers_per_node)
    except GenerationConfigError as error:
        problems += error.violations
    checks = (
        lambda: config.check(sum(per_node)),
        lambda: assert_reload_refit_config_supported(config),
        lambda: http_server_api_key_and_worker_config(config),
    )
    for check in checks:
        try:
            check()
        except GenerationConfigError as error:
            problems += error.violations
        except ConfigError as error:
            problems.append(str(error))
    ep, tp = config.vllm_cfg.expert_parallel_size, config.vllm_cfg.tensor_parallel_size
    if ep not in (1, tp):
        problems.append(
            f"vllm_cfg.expert_parallel_size={ep} must be 1 or tensor_parallel_size={tp}: "
            "the shards of this fleet do not step together"
        )
    if problems:
        raise GenerationConfigError("VllmGeneration", problems)
    return per_node


def _indices(place: ShardPlace) -> list[int]:
    return [bundle.index for bundle in place.bundles]
