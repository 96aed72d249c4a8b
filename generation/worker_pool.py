"""The actors of all shards: created in bundles, called by shard, replaced one by one."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from generation.answers import Answer, gather, values_or_raise
from generation.config import VllmConfig
from generation.limits import Limits
from generation.node_probe import MARK, NodeState, end_marked, look
from generation.placement import Placement, ShardPlace
from weight_sync.errors import EngineStateError

logger = logging.getLogger(__name__)


class WorkerPool(Protocol):
    """What the facade needs of whoever runs its engines."""

    @property
    def shards(self) -> tuple[int, ...]:
        """Numbers of all shards."""
        ...

    @property
    def shard_width(self) -> int:
        """Workers of one shard, ``tp * pp``."""
        ...

    def leader(self, shard: int) -> ActorHandle:
        """Returns the actor that hosts a shard's engine."""
        ...

    def ask(
        self,
        shards: Iterable[int],
        method: str,
        *args: object,
        timeout_s: float,
    ) -> dict[int, Answer[Any]]:
        """Calls a method on the leaders of ``shards`` at once; one answer each, none raises."""
        ...


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """How one worker was created, so that it can be created again the same way.

    Attributes:
        shard: Its shard.
        place: Index among the shard's bundles; 0 is the leader.
        name: Name of its actor.
        options: Ray options, its bundle included.
    """

    shard: int
    place: int
    name: str
    options: dict[str, Any]


def load_class(path: str) -> type:
    """Imports ``package.module.Class``."""
    module, _, name = path.rpartition(".")
    found: type = getattr(importlib.import_module(module), name)
    return found


class RayWorkerPool:
    """Ray actors, one per bundle.

    Args:
        cluster: Grants the bundles; its placement groups exist.
        places: The bundles of each shard.
        config: The fleet's config, with the HTTP key where one is required.
        worker_class: Path of the actor class.
        environment: Environment variables of every worker.
        name_prefix: Prefix of the actors' names.
        limits: Deadlines.
    """

    def __init__(
        self,
        cluster: Placement,
        places: Sequence[ShardPlace],
        config: VllmConfig,
        worker_class: str,
        environment: dict[str, str],
        name_prefix: str,
        limits: Limits,
    ) -> None:
        self._cluster = cluster
        self._places = {place.shard: place for place in places}
        self._config = config
        self._environment = environment
        self._limits = limits
        found = load_class(worker_class)
        groups = getattr(found, "CONCURRENCY_GROUPS", None)
        self._class = ray.remote(concurrency_groups=groups)(found) if groups else ray.remote(found)
        self._run = secrets.token_hex(8)
        self._generation = dict.fromkeys(self._places, 0)
        self.shards: tuple[int, ...] = tuple(self._places)
        self.shard_width = config.engine_world_size
        self._specs = {
            (place.shard, i): WorkerSpec(
                place.shard,
                i,
                f"{name_prefix}-{self._run}-{place.shard}-{i}",
                cluster.scheduling_options(bundle),
            )
            for place in places
            for i, bundle in enumerate(place.bundles)
        }
        self._workers: dict[tuple[int, int], ActorHandle] = {}

    # --- creation -------------------------------------------------------------------------------

    def create(self, shards: Iterable[int], *, current: bool) -> None:
        """Creates the actors of shards; their engines are not loaded yet.

        Args:
            shards: The shards.
            current: Whether what the engines load may be served before a refit.

        Raises:
            WeightSyncError: An actor does not answer in time.
        """
        chosen = list(shards)
        for shard in chosen:
            for place in range(self.shard_width):
                self._workers[shard, place] = self._create(self._specs[shard, place], current)
        for place in range(self.shard_width):
            refs = {s: self._workers[s, place].is_alive.remote() for s in chosen}
            values_or_raise(gather(refs, "start", self._limits.load_s))

    def _create(self, spec: WorkerSpec, current: bool) -> ActorHandle:
        round_ = self._generation[spec.shard]
        options = {
            **spec.options,
            "name": spec.name if not round_ else f"{spec.name}-r{round_}",
            "max_restarts": 0,
            "runtime_env": {"env_vars": {**self._environment, MARK: self.mark(spec.shard)}},
        }
        return self._class.options(**options).remote(
            self._config, spec.shard, spec.place == 0, current
        )

    def load(self, shards: Iterable[int]) -> None:
        """Loads the engines of shards, all at once, and starts what needs a live engine.

        Raises:
            WeightSyncError: One failed or took too long.
        """
        chosen = list(shards)
        devices = {shard: [i for ids in self._device_ids(shard) for i in ids] for shard in chosen}
        refs = {s: self.leader(s).load_model.remote(devices[s]) for s in chosen}
        values_or_raise(gather(refs, "load_model", self._limits.load_s))
        values_or_raise(self.ask(chosen, "post_init", timeout_s=self._limits.load_s))

    def _device_ids(self, shard: int) -> list[list[str]]:
        refs = {p: self._workers[shard, p].device_ids.remote() for p in range(self.shard_width)}
        found = values_or_raise(gather(refs, "device_ids", self._limits.call_s))
        return [found[place] for place in range(self.shard_width)]

    def mark(self, shard: int) -> str:
        """Returns the mark in the environment of all processes of a shard's present engine."""
        return f"{self._run}-{shard}-{self._generation[shard]}"

    # --- calls ----------------------------------------------------------------------------------

    def leader(self, shard: int) -> ActorHandle:
        """Returns the actor that hosts a shard's engine.

        Raises:
            EngineStateError: The shard does not exist or was shut down.
        """
        worker = self._workers.get((shard, 0))
        if worker is None:
            raise EngineStateError(
                f"shard {shard} has no workers; the fleet has shards {list(self.shards)}"
            )
        return worker

    def leader_index(self, shard: int) -> int:
        """Returns the index of a shard's leader among all workers."""
        return shard * self.shard_width

    @property
    def is_empty(self) -> bool:
        """Whether there is no worker."""
        return not self._workers

    def ask(
        self,
        shards: Iterable[int],
        method: str,
        *args: object,
        timeout_s: float,
    ) -> dict[int, Answer[Any]]:
        """Calls a method on the leaders of ``shards`` at once; one answer each, none raises."""
        refs: dict[int, ray.ObjectRef] = {}
        answers: dict[int, Answer[Any]] = {}
        for shard in shards:
            try:
                refs[shard] = getattr(self.leader(shard), method).remote(*args)
            except EngineStateError as error:  # being replaced by another thread just now
                answers[shard] = Answer(error=error, dead=True)
        return answers | gather(refs, method, timeout_s)

    def look_at_node(self, shard: int, timeout_s: float) -> NodeState:
        """Reads processes and GPUs of a shard's machine, from a process outside the shard."""
        return self._on_node(shard, look, self.mark(shard), timeout_s)

    def _on_node(
        self,
        shard: int,
        function: Any,  # noqa: ANN401 - any function of node_probe
        mark: str,
        timeout_s: float,
    ) -> Any:  # noqa: ANN401 - what the function returns
        options = self._cluster.node_options(self._places[shard].bundles[0])
        task = ray.remote(function).options(max_retries=0, **options)
        try:
            # Twice: the task keeps its own deadline, but has to be started first.
            return ray.get(task.remote(mark, timeout_s), timeout=timeout_s * 2)
        except RayError as error:
            raise EngineStateError(
                f"the machine of shard {shard} did not answer: {type(error).__name__}; check its "
                "Ray node"
            ) from error

    # --- end ------------------------------------------------------------------------------------

    def end(self, shard: int) -> dict[int, str]:
        """Kills the actors of a shard and every process they left behind.

        Returns:
            Processes that could not be ended.
        """
        for place in range(self.shard_width):
            worker = self._workers.pop((shard, place), None)
            if worker is not None:
                with contextlib.suppress(Exception):  # it may be dead already; that is the aim
                    ray.kill(worker, no_restart=True)
        left: dict[int, str] = self._on_node(
            shard, end_marked, self.mark(shard), self._limits.shutdown_s
        )
        return left

    def recreate(self, shard: int) -> None:
        """Replaces a shard: ends what is left of it and creates its actors in the same bundles.

        Raises:
            EngineStateError: The shard does not exist, or a process of it does not end: it would
                hold the devices the replacement needs.
        """
        if shard not in self._places:
            raise EngineStateError(
                f"shard {shard} cannot be replaced; the fleet has shards {list(self.shards)}"
            )
        left = self.end(shard)
        if left:
            raise EngineStateError(
                f"processes {left} of shard {shard} do not end; end them by hand, then restart it"
            )
        self._generation[shard] += 1
        self.create([shard], current=False)

    def shutdown(self) -> bool:
        """Ends all engines, then all actors. True when nothing is left; safe twice."""
        shards = sorted({shard for shard, _ in self._workers})
        if not shards or not ray.is_initialized():
            # Ray ends all actors with itself.
            self._workers.clear()
            return True
        answers = self.ask(shards, "shutdown", timeout_s=self._limits.shutdown_s)
        for shard, answer in answers.items():
            if answer.error is not None and not answer.dead:
                logger.warning("shard %d did not shut down by itself: %s", shard, answer.error)
        start = time.monotonic()
        left = {shard: self.end(shard) for shard in shards}
        logger.debug("%d shards ended in %.1f s", len(shards), time.monotonic() - start)
        clean = all(a.yes or a.dead for a in answers.values())
        return clean and not any(left.values())
