"""The actor that hosts vLLM's synchronous engine: whole batches, one call at a time."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any, ClassVar

import ray

from generation.batch import Batch, check_right_padding
from generation.config import VllmConfig
from generation.engine_actor import EngineActor
from generation.engine_args import own_setting, sampling_arguments
from generation.engine_facts import (
    callers_errors,
    connector_can_reset,
    has_profiler,
    read_counters,
    report_devices,
    require_engine,
)
from generation.errors import InvalidRolloutError
from generation.memory import MEMORY_TAGS, asleep_by_worker, memory_tags
from generation.outputs import Completion, combine, combine_texts, completion_of, no_room
from generation.pause import REFIT
from generation.prompts import format_prompt_for_vllm_generation
from weight_sync.errors import ConfigError, EngineStateError
from weight_sync.messages import Status, encode


class SyncEngineActor(EngineActor):
    """One shard with vLLM's ``LLM``.

    Calls queue behind each other, so nothing runs while a refit, sleep or reset is under way, and
    there is nothing to pause. Only :meth:`is_alive` and :meth:`pid` answer in between.
    """

    CONCURRENCY_GROUPS: ClassVar[dict[str, int]] = {"control": 1}

    def __init__(self, config: VllmConfig, shard: int, owner: bool, current: bool) -> None:
        super().__init__(config, shard, owner, current)
        self._refitting = False

    def load_model(self, device_ids: list[str]) -> bool:
        """Starts the engine on the given devices; True when it can generate."""
        from vllm import LLM

        self._engine = LLM(**self.arguments(device_ids))
        # From here on the workers keep, across sleep, what refits do not bring.
        self.weight_sync_call(encode(Status()))
        self._label_engine()
        return True

    def post_init(self) -> bool:
        """Nothing more to start for this engine."""
        return True

    def base_url(self) -> str | None:
        """None: this engine serves no HTTP."""
        return None

    @ray.method(concurrency_group="control")
    def is_alive(self) -> bool:
        """True, also while a batch runs; raises when the engine of this actor is dead."""
        engine = self._engine
        if engine is not None:
            require_engine(engine)
        return True

    @ray.method(concurrency_group="control")
    def pid(self) -> int:
        """Returns the actor's process id."""
        return super().pid()

    def shutdown(self) -> bool:
        """Drops the engine; True also when there is none."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
            del engine
            gc.collect()
        return True

    def report_device_id(self) -> list[str]:
        """Returns one device identity per worker of the shard, in rank order."""
        return report_devices(self.config.engine_world_size)

    # --- generation -----------------------------------------------------------------------------

    def generate(self, data: Mapping[str, Any], greedy: bool) -> Batch:
        """Answers a right-padded batch of token ids."""
        self._require_whole()
        check_right_padding(data["input_ids"], data["input_lengths"], self.config.pad_token_id)
        prompts = format_prompt_for_vllm_generation(data)
        assert isinstance(prompts, list)
        routed = self.config.routed
        done = self._complete(prompts, data, data["input_lengths"].tolist(), greedy, routed)
        width = int(data["input_ids"].shape[1])
        return combine(done, width, self.config.pad_token_id, routed=routed)

    def generate_text(self, data: Mapping[str, Any], greedy: bool) -> Batch:
        """Answers text prompts."""
        self._require_whole()
        prompts = list(data["prompts"])
        return combine_texts(self._complete(prompts, data, [0] * len(prompts), greedy, False))

    def _require_whole(self) -> None:
        self.require_ready()
        if self._engine.llm_engine.is_sleeping():
            raise EngineStateError(
                f"shard {self.shard} is asleep; call prepare_for_generation() before generating"
            )
        if self._refitting:
            raise EngineStateError(
                f"the last refit of shard {self.shard} did not finish; refit it before generating"
            )

    def _complete(
        self,
        prompts: list[Any],
        data: Mapping[str, Any],
        lengths: list[int],
        greedy: bool,
        routed: bool,
    ) -> list[Completion]:
        from vllm import SamplingParams

        arguments = [
            sampling_arguments(
                self.config,
                greedy=greedy,
                stop_strings=own_setting(data, "stop_strings", sample),
                prompt_tokens=length,
                max_new_tokens=own_setting(data, "max_new_tokens", sample),
            )
            for sample, length in enumerate(lengths)
        ]
        asked = [i for i, a in enumerate(arguments) if a["max_tokens"]]
        try:
            outputs = self._engine.generate(
                [prompts[i] for i in asked],
                [SamplingParams(**arguments[i]) for i in asked],
                use_tqdm=False,
            )
        except callers_errors() as error:
            raise InvalidRolloutError(f"vLLM refuses the batch: {error}") from error
        by_index = dict(zip(asked, outputs, strict=True))
        return [
            completion_of(by_index[i], self._label, routed=routed)
            if i in by_index
            else no_room(prompts[i]["prompt_token_ids"])
            for i in range(len(prompts))
        ]

    # --- refit and sleep ------------------------------------------------------------------------

    def weight_sync_call(self, request: bytes) -> list[bytes]:
        """Runs one refit request on every worker; replies in rank order."""
        return list(self._engine.collective_rpc("weight_sync_call", args=(request,)))

    def pause(self, owner: str, clear_cache: bool) -> bool:
        """True: between calls nothing runs; caches are dropped when asked for."""
        if clear_cache and not self.invalidate():
            return False
        self._refitting = self._refitting or owner == REFIT
        return True

    def resume(self, owner: str) -> bool:
        """Ends a refit; True unless one is still unfinished."""
        self._refitting = self._refitting and owner != REFIT
        return not self._refitting

    def refit_unfinished(self) -> bool:
        """Whether a refit paused this shard and did not end: its weights may be mixed."""
        return self._refitting

    def invalidate(self) -> bool:
        """Drops prefix, KV connector, multimodal and encoder caches; the engine's real answer."""
        dropped = self._engine.reset_prefix_cache(reset_connector=True)
        if dropped is not True or not connector_can_reset(self._engine.llm_engine.vllm_config):
            return False
        self._engine.reset_mm_cache()
        self._engine.llm_engine.engine_core.reset_encoder_cache()
        return True

    def set_version(self, version: int) -> bool:
        """Stamps later tokens with a version that a verified refit installed."""
        self._version = version
        return self.set_label(version)

    def set_label(self, version: int) -> bool:
        """Stamps later tokens; says nothing about whether the weights may be served."""
        self._label = version
        self._label_engine()
        return True

    def _label_engine(self) -> None:
        setter = getattr(self._engine, "update_weight_version", None)
        if setter is not None:
            setter(str(self._label))

    def sleep(self, level: int) -> bool:
        """Frees device memory where the platform can; vLLM drops all caches on the way.

        True when every worker says that its weights and KV cache are asleep. False, and awake, when
        a KV connector cannot drop its cache.
        """
        if not connector_can_reset(self._engine.llm_engine.vllm_config):
            return False
        self._engine.sleep(level=level)
        gc.collect()
        return all(asleep == MEMORY_TAGS for asleep in self._asleep())

    def wake_up(self, tags: list[str] | None) -> bool:
        """Wakes the memory behind ``tags``, all of it for None.

        True when every worker says that this memory is back, and, when that was the last of it, the
        engine that it is not sleeping.

        Raises:
            InvalidRolloutError: An unknown tag.
        """
        wanted = memory_tags(tags)
        asleep = frozenset[str]().union(*self._asleep())
        due = wanted & asleep
        if due:
            # All that is left as None, so that vLLM also wakes what it gave names of its own.
            self._engine.wake_up(tags=None if due == asleep else sorted(due))
        left = frozenset[str]().union(*self._asleep())
        if left:
            return not wanted & left
        return not self._engine.llm_engine.is_sleeping()

    def _asleep(self) -> list[frozenset[str]]:
        return asleep_by_worker(self.weight_sync_call(encode(Status())))

    # --- observation ----------------------------------------------------------------------------

    def counters(self) -> dict[str, float | list[float]]:
        """Returns this engine's counters."""
        return read_counters()

    def profile(self, start: bool) -> bool:
        """Starts or stops the profilers of all workers.

        Raises:
            ConfigError: No profiler is configured.
        """
        if not has_profiler(self._engine.llm_engine.vllm_config):
            raise ConfigError(
                "no profiler is configured; set vllm_kwargs={'profiler_config': {'profiler': "
                "'torch', 'torch_profiler_dir': ...}}"
            )
        _ = self._engine.start_profile() if start else self._engine.stop_profile()
        return True
