"""State that the parts of the facade share, and how they ask all shards one yes-or-no question."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from generation.answers import Answer
from generation.config import VllmConfig
from generation.errors import FleetStateError
from generation.limits import Limits
from generation.refit_driver import RefitDriver
from generation.roster import Roster
from generation.worker_pool import RayWorkerPool

logger = logging.getLogger("generation.vllm_generation")


class FleetBase:
    """What :class:`VllmGeneration` is made of; built by its constructor."""

    config: VllmConfig
    limits: Limits
    pool: RayWorkerPool
    roster: Roster
    refits: RefitDriver
    _held = False

    @property
    def dp_size(self) -> int:
        """Number of shards."""
        return len(self.pool.shards)

    def _all_say_yes(
        self, shards: Sequence[int], method: str, *args: object, timeout_s: float | None = None
    ) -> bool:
        """Asks shards at once. True only if every one explicitly answered True.

        Every other answer is logged with the shard that gave it.
        """
        limit = self.limits.call_s if timeout_s is None else timeout_s
        answers = self.pool.ask(shards, method, *args, timeout_s=limit)
        self._note_deaths(answers)
        for shard, answer in answers.items():
            if not answer.yes:
                logger.warning("%s: shard %d: %s", method, shard, answer.error or answer.value)
        return bool(answers) and all(answer.yes for answer in answers.values())

    def _note_deaths(self, answers: dict[int, Answer[Any]]) -> None:
        for shard, answer in answers.items():
            if answer.dead:
                self.roster.died(shard, answer.error or "died")

    def _require_async(self, what: str) -> None:
        if not self.config.vllm_cfg.async_engine:
            raise FleetStateError(f"{what} needs vllm_cfg.async_engine=True; this fleet is sync")

    def _require_sync(self, what: str) -> None:
        if self.config.vllm_cfg.async_engine:
            raise FleetStateError(f"{what} needs vllm_cfg.async_engine=False; this fleet is async")

    def _require_workers(self) -> None:
        if self.pool.is_empty:
            raise FleetStateError("the fleet has no workers; it was shut down, build a new one")
