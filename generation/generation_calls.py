"""Generation over the fleet: whole batches to sync engines, single samples to async ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from generation.answers import gather, translate, values_or_raise
from generation.batch import Batch
from generation.errors import EngineOutputError, InvalidRolloutError, NoHealthyShardsError
from generation.fleet_base import FleetBase
from generation.outputs import check_result, combine, combine_texts
from generation.telemetry import TelemetrySink, _record_vllm_generation_metrics
from weight_sync.errors import (
    ConfigError,
    GenerationUnavailableError,
    PeerDeadError,
    WeightSyncError,
)

# What the caller sent is at fault, not the shard.
_CALLERS_FAULT = (ConfigError, InvalidRolloutError)


class GenerationCalls(FleetBase):
    """``generate*`` of the facade."""

    telemetry: TelemetrySink | None = None

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> Batch:
        """Answers a batch of token ids on sync engines, split over the serving shards.

        Args:
            data: ``input_ids`` int64 ``[samples, width]`` padded on the right, ``input_lengths``
                int64 ``[samples]``; optionally ``stop_strings``, a list or None per sample,
                ``max_new_tokens``, a list with a limit below the configured one or None per sample,
                and media.
            greedy: Take the most likely token instead of sampling.

        Returns:
            ``output_ids``, ``logprobs`` (float32, 0 over prompt and padding),
            ``generation_lengths``, ``unpadded_sequence_lengths``, ``truncated`` and
            ``weight_version_spans``, in sample order. With ``enable_return_routed_experts`` also
            ``routed_experts``, for each sample int16 ``[prompt + generated tokens, layers, topk]``,
            or None for one that was given no room.

        Raises:
            FleetStateError: The engines are async.
            InvalidRolloutError: A column is missing or contradicts another.
            GenerationUnavailableError: A shard died or did not answer; the batch is not answered.
        """
        self._require_sync("generate()")
        batch = Batch(data)
        batch.require("input_ids", "input_lengths")
        pad = self.config.pad_token_id
        width = int(batch["input_ids"].shape[1])
        empty = combine([], width, pad, routed=self.config.routed)
        begin = time.perf_counter()
        result = self._split(batch, "generate", greedy, empty, {"output_ids": pad})
        check_result(result)
        seconds = time.perf_counter() - begin
        _record_vllm_generation_metrics(
            self.config.model_name, batch, result, seconds, sink=self.telemetry
        )
        return result

    def generate_text(self, data: Mapping[str, Any], greedy: bool = False) -> Batch:
        """Answers text prompts on sync engines, split over the serving shards.

        Args:
            data: ``prompts``, a list of strings; optionally ``stop_strings`` and
                ``max_new_tokens``.
            greedy: Take the most likely token instead of sampling.

        Returns:
            ``texts`` and ``weight_version_spans``, in sample order.

        Raises:
            FleetStateError: The engines are async.
            InvalidRolloutError: No prompts.
            GenerationUnavailableError: A shard died or did not answer; the batch is not answered.
        """
        self._require_sync("generate_text()")
        batch = Batch(data)
        batch.require("prompts")
        return self._split(batch, "generate_text", greedy, combine_texts([]), {})

    def _split(
        self, batch: Batch, method: str, greedy: bool, empty: Batch, pad: Mapping[str, float]
    ) -> Batch:
        self._require_workers()
        shards = self.roster.serving()
        if not shards:
            raise NoHealthyShardsError("no shard serves; restart one and refit it")
        parts = dict(zip(shards, batch.shard(len(shards), allow_uneven=True), strict=True))
        refs = {
            shard: getattr(self.pool.leader(shard), method).remote(part, greedy)
            for shard, part in parts.items()
            if part.size
        }
        answers = gather(refs, method, self.limits.batch_s)
        self._note_deaths(answers)
        for answer in answers.values():
            if isinstance(answer.error, PeerDeadError):
                raise GenerationUnavailableError(
                    f"{answer.error} The batch was not answered; send it again to the other shards"
                ) from answer.error
        values = values_or_raise(answers)
        return Batch.concat([values[shard] for shard in refs], pad) if refs else empty

    # --- async ----------------------------------------------------------------------------------

    async def generate_async(
        self, data: Mapping[str, Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, Batch]]:
        """Answers one sample of token ids on an async engine.

        Args:
            data: As for :meth:`generate`, with one sample.
            greedy: Take the most likely token instead of sampling.

        Yields:
            The sample's index and its result batch, with ``gen_leader_worker_idx`` added; nothing
            for an empty batch.

        Raises:
            FleetStateError: The engines are sync.
            InvalidRolloutError: A column is missing, or more than one sample.
            GenerationUnavailableError: The shard died, failed or did not answer in time.
        """
        steps = self._async_generate_base(
            data, "generate_async", lambda b: _check(b, "input_ids", "input_lengths"), greedy
        )
        async for found in steps:
            yield found

    async def generate_text_async(
        self, data: Mapping[str, Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, Batch]]:
        """Answers one text prompt on an async engine; as :meth:`generate_async`, with ``texts``."""
        steps = self._async_generate_base(
            data, "generate_text_async", lambda b: _check(b, "prompts"), greedy
        )
        async for found in steps:
            yield found

    async def _async_generate_base(
        self,
        data: Mapping[str, Any],
        method_name: str,
        validate: Callable[[Batch], bool],
        greedy: bool,
    ) -> AsyncIterator[tuple[int, Batch]]:
        """One request: validates, chooses a shard, and gives the shard back whatever happens."""
        self._require_async(f"{method_name}()")
        batch = Batch(data)
        if not validate(batch):
            return
        if batch.size != 1:
            raise InvalidRolloutError(
                f"{method_name}() takes one sample, got {batch.size}; call it once per sample"
            )
        self._require_workers()
        shard = self._next_dp_shard_idx()
        try:
            steps = self._generate_on_shard(
                data=batch,
                method_name=method_name,
                greedy=greedy,
                dp_shard_idx=shard,
                leader_worker_idx=self.pool.leader_index(shard),
            )
            async for found in steps:
                yield found
        finally:
            self.roster.give_back(shard)

    def _next_dp_shard_idx(self) -> int:
        """Chooses the next request's shard: the attached selector's, else each in turn."""
        return self.roster.take()

    async def _generate_on_shard(
        self,
        *,
        data: Batch,
        method_name: str,
        greedy: bool,
        dp_shard_idx: int,
        leader_worker_idx: int,
    ) -> AsyncIterator[tuple[int, Batch]]:
        """Runs one request on a shard, timed from its dispatch to its last token."""
        begin = time.perf_counter()
        who = f"shard {dp_shard_idx}"
        try:
            ref = getattr(self.pool.leader(dp_shard_idx), method_name).remote(data, greedy)
        except RayError as error:
            raise self._request_failed(dp_shard_idx, error, method_name) from error
        try:
            index, result = await asyncio.wait_for(_awaited(ref), self.limits.request_s)
        except TimeoutError as error:
            ray.cancel(ref, force=False)
            failure = GenerationUnavailableError(
                f"{who} did not finish a request within {self.limits.request_s:g} s; raise "
                "Limits.request_s if responses take that long, else look at the shard"
            )
            self.roster.failed(dp_shard_idx, failure)
            raise failure from error
        except (asyncio.CancelledError, GeneratorExit):
            ray.cancel(ref, force=False)
            raise
        except RayError as error:
            raise self._request_failed(dp_shard_idx, error, method_name) from error
        self.roster.succeeded(dp_shard_idx)
        if result is None or not result.size:
            raise EngineOutputError(f"{who} returned no output; send the request again")
        _record_vllm_generation_metrics(
            self.config.model_name, data, result, time.perf_counter() - begin, sink=self.telemetry
        )
        yield index, Batch({**result, "gen_leader_worker_idx": [leader_worker_idx]})

    def _request_failed(self, shard: int, error: RayError, what: str) -> WeightSyncError:
        translated, dead = translate(error, f"shard {shard}", what)
        if isinstance(translated, _CALLERS_FAULT):
            return translated
        if dead:
            self.roster.died(shard, translated)
        else:
            self.roster.failed(shard, translated)
        return GenerationUnavailableError(f"{translated} The request may be sent again")


async def _awaited(ref: ray.ObjectRef) -> Any:  # noqa: ANN401 - what the actor returns
    return await ref


def _check(batch: Batch, *columns: str) -> bool:
    """False for a batch without samples; raises for one without the columns."""
    if not batch:
        return False
    batch.require(*columns)
    return batch.size > 0
