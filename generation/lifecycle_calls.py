"""Pausing, caches and sleep of the fleet; every bool is the conjunction of explicit answers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from generation.fleet_base import FleetBase
from generation.pause import USER

logger = logging.getLogger("generation.vllm_generation")

SLEEP_LEVEL = 1


class LifecycleCalls(FleetBase):
    """Pause, resume, invalidate, sleep and wake of the facade."""

    def prepare_for_generation(self, *, tags: Sequence[str] | None = None) -> bool:
        """Wakes colocated engines; engines with devices of their own are always awake.

        Args:
            tags: ``weights`` and/or ``kv_cache``; None for both.

        Returns:
            True if every living shard answered True.
        """
        if not self.config.colocated:
            return True
        wanted = None if tags is None else list(tags)
        return self._all_say_yes(self.roster.alive(), "wake_up", wanted)

    def finish_generation(self) -> bool:
        """Ends a phase of generation: colocated engines sleep, others drop their prefix cache.

        Returns:
            True if every living shard answered True. Requests in flight are kept: asleep they wait
            and are recomputed later; awake they keep their blocks, and the answer is False.
        """
        alive = self.roster.alive()
        if not self.config.colocated:
            return self._all_say_yes(alive, "invalidate")
        return self._all_say_yes(alive, "sleep", SLEEP_LEVEL)

    def invalidate_kv_cache(self) -> bool:
        """Drops prefix, KV connector, multimodal and encoder caches of every living shard.

        Returns:
            True if every engine says that it did; vLLM refuses while requests run, so pause with
            ``clear_cache=True`` when there are any.
        """
        return self._all_say_yes(self.roster.alive(), "invalidate")

    def pause_generation_for_refit(
        self, *, clear_cache: bool, timeout_s: float | None = None
    ) -> bool:
        """Pauses every shard that takes part in refits; requests in flight stay and go on later.

        A refit pauses and resumes by itself; this holds the fleet across several steps. A shard is
        held until both this and the refit let go. Idempotent.

        Args:
            clear_cache: Drop caches; requests in flight are recomputed with the weights they find.
            timeout_s: Deadline, seconds.

        Returns:
            True if all are paused. When one is not, those that are were resumed again.

        Raises:
            FleetStateError: The engines are sync; they stand still between calls anyway.
        """
        self._require_async("pause_generation_for_refit()")
        limit = self.limits.call_s if timeout_s is None else timeout_s
        shards = self.roster.participants()
        answers = self.pool.ask(shards, "pause", USER, clear_cache, timeout_s=limit)
        self._note_deaths(answers)
        wrong = {s: a for s, a in answers.items() if not a.yes}
        if answers and not wrong:
            self._held = True
            return True
        for shard, answer in wrong.items():
            logger.warning("pause: shard %d: %s", shard, answer.error or answer.value)
        # Also those that did not answer: a pause that was only late would hold them for ever.
        undo = [s for s in answers if not answers[s].dead]
        self.pool.ask(undo, "resume", USER, timeout_s=limit)
        return False

    def resume_generation_after_refit(self, *, timeout_s: float | None = None) -> bool:
        """Lets every living shard go on; dead ones are no error. Idempotent.

        Returns:
            True if every living engine says that it schedules again. False where one is still held:
            by sleep, or by a refit that did not finish (refit that shard).

        Raises:
            FleetStateError: The engines are sync.
        """
        self._require_async("resume_generation_after_refit()")
        limit = self.limits.call_s if timeout_s is None else timeout_s
        answers = self.pool.ask(self.roster.alive(), "resume", USER, timeout_s=limit)
        self._note_deaths(answers)
        self._held = False
        living = {s: a for s, a in answers.items() if not a.dead}
        for shard, answer in living.items():
            if not answer.yes:
                logger.warning("resume: shard %d: %s", shard, answer.error or "still held")
        return bool(living) and all(answer.yes for answer in living.values())
