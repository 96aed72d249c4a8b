"""The actor that hosts vLLM's asynchronous engine: single requests, pauses, the HTTP server."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from generation.batch import Batch
from generation.capture import CaptureRecord, CaptureSink
from generation.config import VllmConfig
from generation.engine_actor import EngineActor
from generation.engine_args import own_setting, sampling_arguments
from generation.engine_facts import (
    callers_errors,
    connector_can_reset,
    has_profiler,
    read_counters,
    report_devices,
)
from generation.errors import EngineOutputError, InvalidRolloutError
from generation.http_server import HttpServer
from generation.memory import MEMORY_TAGS, asleep_by_worker, memory_tags
from generation.metrics_sampler import MetricsSampler
from generation.outputs import Completion, combine, combine_texts, completion_of, no_room
from generation.pause import REFIT, SLEEP, PauseOwners
from generation.prompts import format_prompt_for_vllm_generation, validate_rollout_prompt
from generation.token_capture import TokenCapture, drain_records
from generation.version_book import VersionBook
from weight_sync.errors import ConfigError, EngineStateError
from weight_sync.messages import Status, encode

T = TypeVar("T")

_LIFE_CHECK_S = 0.2


class AsyncEngineActor(EngineActor):
    """One shard with vLLM's ``AsyncLLM``; all methods run on the actor's event loop."""

    def __init__(self, config: VllmConfig, shard: int, owner: bool, current: bool) -> None:
        super().__init__(config, shard, owner, current)
        self._owners = PauseOwners()
        self._asleep: frozenset[str] = frozenset()
        self._control = asyncio.Lock()
        self._book = VersionBook()
        self._capture = TokenCapture(lambda: self._label, self._book)
        self._server: HttpServer | None = None
        self._sampler: MetricsSampler | None = None

    # --- life -----------------------------------------------------------------------------------

    async def load_model(self, device_ids: list[str]) -> bool:
        """Starts the engine on the given devices; True when it can generate."""
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**self.arguments(device_ids)))
        self._engine.generate = self._capture.around(self._engine.generate)
        await self._label_engine()
        # From here on the workers keep, across sleep, what refits do not bring.
        await self.weight_sync_call(encode(Status()))
        return True

    async def post_init(self) -> bool:
        """Starts what needs a live engine: the HTTP server and the metrics sampler."""
        engine = self.config.vllm_cfg
        if engine.expose_http_server and self._server is None:
            self.reserve_port()
            self._server = HttpServer(self._engine, self.config, self._http_version)
            await self._server.start(self._socket)
        if engine.enable_vllm_metrics_logger and self._sampler is None:
            self._sampler = MetricsSampler(engine.vllm_metrics_logger_interval)
            self._sampler.start()
        return True

    def base_url(self) -> str | None:
        """Returns the HTTP server's base URL; None without one."""
        return self.reserve_port() if self.config.vllm_cfg.expose_http_server else None

    async def is_alive(self) -> bool:
        """True; raises when the engine behind this actor is dead."""
        if self._engine is not None:
            await self._engine.check_health()
        return True

    async def shutdown(self) -> bool:
        """Ends server, sampler and engine; True also when nothing runs."""
        if self._server is not None:
            await self._server.close()
            self._server = None
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
        self._capture.remove()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()
        return True

    async def report_device_id(self) -> list[str]:
        """Returns one device identity per worker of the shard, in rank order."""
        return report_devices(self.config.engine_world_size)

    # --- generation -----------------------------------------------------------------------------

    async def generate_async(self, data: Mapping[str, Any], greedy: bool) -> tuple[int, Batch]:
        """Answers one sample of token ids; returns its index in ``data`` and its result batch."""
        self.require_ready()
        prompt = format_prompt_for_vllm_generation(data, 0)
        assert isinstance(prompt, dict)
        length = int(data["input_lengths"][0])
        routed = self.config.routed
        done = await self._complete(prompt, data, length, greedy, routed)
        if "multi_modal_data" not in prompt:
            validate_rollout_prompt(prompt["prompt_token_ids"], done.prompt_token_ids)
        width = int(data["input_ids"].shape[1])
        return 0, combine([done], width, self.config.pad_token_id, routed=routed)

    async def generate_text_async(self, data: Mapping[str, Any], greedy: bool) -> tuple[int, Batch]:
        """Answers one text prompt; returns its index in ``data`` and its result batch."""
        self.require_ready()
        done = await self._complete(data["prompts"][0], data, 0, greedy, False)
        return 0, combine_texts([done])

    async def _complete(
        self,
        prompt: dict[str, Any] | str,
        data: Mapping[str, Any],
        prompt_tokens: int,
        greedy: bool,
        routed: bool,
    ) -> Completion:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        arguments = sampling_arguments(
            self.config,
            greedy=greedy,
            stop_strings=own_setting(data, "stop_strings", 0),
            prompt_tokens=prompt_tokens,
            max_new_tokens=own_setting(data, "max_new_tokens", 0),
        )
        if not arguments["max_tokens"]:
            assert isinstance(prompt, dict)
            return no_room(prompt["prompt_token_ids"])
        params = SamplingParams(**arguments, output_kind=RequestOutputKind.FINAL_ONLY)
        final = None
        outputs: AsyncIterator[Any] = self._engine.generate(prompt, params, uuid.uuid4().hex)
        try:
            async for output in outputs:
                final = output
        except callers_errors() as error:
            raise InvalidRolloutError(f"vLLM refuses the request: {error}") from error
        if final is None or not final.finished:
            raise EngineOutputError(
                f"shard {self.shard} ended a request without output; send it again"
            )
        return completion_of(final, self._label, routed=routed)

    async def _bounded(self, call: Awaitable[T]) -> T:
        """Awaits a call of the engine, but not longer than the engine lives.

        vLLM leaves calls unanswered that were under way when its engine process died.

        Raises:
            EngineDeadError: vLLM's own, once it noticed.
        """
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_LIFE_CHECK_S)
                if not task.done() and self._engine.errored:
                    raise self._engine.dead_error
            return task.result()
        finally:
            task.cancel()

    # --- refit ----------------------------------------------------------------------------------

    async def weight_sync_call(self, request: bytes) -> list[bytes]:
        """Runs one refit request on every worker; replies in rank order."""
        replies = await self._bounded(
            self._engine.collective_rpc("weight_sync_call", args=(request,))
        )
        return list(replies)

    async def pause(self, owner: str, clear_cache: bool) -> bool:
        """Stops scheduling for ``owner``; requests in flight stay and go on after resume.

        Raises:
            EngineStateError: The weights are asleep.
        """
        async with self._control:
            if owner == REFIT and "weights" in self._asleep:
                raise EngineStateError(
                    f"the weights of shard {self.shard} are asleep; wake them with "
                    "prepare_for_generation(tags=['weights']) before the refit"
                )
            if not self._owners.holds(SLEEP):
                try:
                    await self._bounded(
                        self._engine.pause_generation(mode="keep", clear_cache=clear_cache)
                    )
                except BaseException:
                    if not self._owners.any:
                        await self._bounded(self._engine.resume_generation())
                    raise
            self._owners.add(owner)
            return True

    async def resume(self, owner: str) -> bool:
        """Ends the pause of ``owner``; True when the engine schedules again."""
        async with self._control:
            if not self._owners.remove(owner):
                return False
            await self._bounded(self._engine.resume_generation())
            return not await self._bounded(self._engine.is_paused())

    async def refit_unfinished(self) -> bool:
        """Whether a refit paused this shard and did not end: its weights may be mixed."""
        return self._owners.holds(REFIT)

    async def is_paused(self) -> bool:
        """Whether the engine stands still, as the engine itself says."""
        return bool(await self._bounded(self._engine.is_paused()))

    async def invalidate(self) -> bool:
        """Drops prefix, KV connector, multimodal and encoder caches; the engine's real answer.

        False when requests run (their blocks cannot be dropped; pause first), or when a configured
        KV connector has no way to drop what it cached.
        """
        async with self._control:
            dropped = await self._bounded(
                self._engine.reset_prefix_cache(
                    reset_running_requests=self._owners.any, reset_connector=True
                )
            )
            if dropped is not True or not connector_can_reset(self._engine.vllm_config):
                return False
            await self._bounded(self._engine.reset_mm_cache())
            await self._bounded(self._engine.reset_encoder_cache())
            return True

    async def set_version(self, version: int) -> bool:
        """Stamps later tokens with a version that a verified refit installed."""
        self._version = version
        return await self.set_label(version)

    async def set_label(self, version: int) -> bool:
        """Stamps later tokens; says nothing about whether the weights may be served."""
        if not hasattr(self._engine, "update_weight_version"):
            self._book.switch(self._engine, self._label)
        self._label = version
        await self._label_engine()
        return True

    async def _label_engine(self) -> None:
        setter = getattr(self._engine, "update_weight_version", None)
        if setter is not None:
            await self._bounded(setter(str(self._label)))

    # --- sleep ----------------------------------------------------------------------------------

    async def sleep(self, level: int) -> bool:
        """Frees device memory where the platform can; requests in flight are recomputed later.

        vLLM drops all caches on the way. True when every worker says that its weights and KV cache
        are asleep. False, and awake, when a KV connector cannot drop its cache.
        """
        async with self._control:
            if not connector_can_reset(self._engine.vllm_config):
                return False
            await self._bounded(self._engine.sleep(level=level, mode="keep"))
            self._owners.add(SLEEP)
            workers = await self._look_who_sleeps()
            return all(asleep == MEMORY_TAGS for asleep in workers)

    async def wake_up(self, tags: list[str] | None) -> bool:
        """Wakes the memory behind ``tags``, all of it for None.

        The engine goes on when everything is awake, unless someone else holds it.

        Returns:
            True when every worker says that this memory is back, and, when that was the last of it
            and nobody holds the engine, the engine that it is not sleeping.

        Raises:
            EngineStateError: Everything would be awake while a refit has not finished.
            InvalidRolloutError: An unknown tag.
        """
        wanted = memory_tags(tags)
        async with self._control:
            await self._look_who_sleeps()
            due = wanted & self._asleep
            if due:
                last = due == self._asleep
                if last:
                    self._owners.check_wake()
                # All that is left as None, so that vLLM also wakes what it gave names of its own.
                await self._bounded(self._engine.wake_up(tags=None if last else sorted(due)))
                await self._look_who_sleeps()
            awake = not self._asleep and self._owners.holds(SLEEP)
            if awake and not self._owners.remove(SLEEP):
                # vLLM resumed by itself; who holds the engine did not ask for that.
                await self._bounded(self._engine.pause_generation(mode="keep", clear_cache=True))
            if self._asleep or self._owners.any:
                return not wanted & self._asleep
            return not await self._bounded(self._engine.is_sleeping())

    async def _look_who_sleeps(self) -> list[frozenset[str]]:
        """Asks every worker what memory of its is asleep, and notes what is of any."""
        workers = asleep_by_worker(await self.weight_sync_call(encode(Status())))
        self._asleep = frozenset[str]().union(*workers)
        return workers

    # --- observation ----------------------------------------------------------------------------

    async def install_capture(self, make_sink: Callable[[int], CaptureSink]) -> bool:
        """Records every request that begins from now on in the sink made for this shard."""
        self._capture.install(make_sink(self.shard))
        return True

    async def drain_captured(self) -> list[CaptureRecord]:
        """Returns and forgets what an in-memory sink recorded."""
        return drain_records(self._capture.sink)

    async def counters(self) -> dict[str, float | list[float]]:
        """Returns this engine's counters."""
        return read_counters()

    async def logger_metrics(self, latest: bool, clear: bool) -> dict[str, list[float]]:
        """Returns sampled gauges: the whole history or the last values; optionally forgets them."""
        return {} if self._sampler is None else self._sampler.read(latest=latest, clear=clear)

    async def profile(self, start: bool) -> bool:
        """Starts or stops the profilers of all workers.

        Raises:
            ConfigError: No profiler is configured.
        """
        if not has_profiler(self._engine.vllm_config):
            raise ConfigError(
                "no profiler is configured; set vllm_kwargs={'profiler_config': {'profiler': "
                "'torch', 'torch_profiler_dir': ...}}"
            )
        await (self._engine.start_profile() if start else self._engine.stop_profile())
        return True

    def _http_version(self) -> int | None:
        return None if self._version is None else self._label
