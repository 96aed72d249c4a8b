"""Settings of the facade: what a fleet is built from, checked in full before anything is started.

The two config classes are frozen. A plain dict (as training configurations are written) becomes
one through ``VllmConfig.from_dict``, which reports every unknown, missing or impossible setting at
once.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from generation.errors import GenerationConfigError

REFIT_TRANSPORTS = ("ipc", "broadcast", "reshard")
_KV_DTYPES_WITH_SCALES = ("fp8", "fp8_e4m3", "fp8_e5m2")


@dataclasses.dataclass(frozen=True)
class VllmSpecificArgs:
    """Engine settings, ``vllm_cfg`` in a configuration.

    Attributes:
        tensor_parallel_size: Workers that share each layer of one engine.
        gpu_memory_utilization: Fraction of device memory the engine may take, in (0, 1].
        max_model_len: Longest prompt plus response, tokens.
        pipeline_parallel_size: Stages of one engine; more than 1 needs ``async_engine``.
        expert_parallel_size: Workers over which experts are split, a multiple of TP.
        async_engine: Engine that takes single requests and streams (vLLM's ``AsyncLLM``).
        precision: Model dtype for vLLM, or ``fp8``.
        load_format: vLLM's load format; None leaves the choice to the facade.
        kv_cache_dtype: vLLM's KV cache dtype.
        enforce_eager: No CUDA graphs.
        skip_tokenizer_init: Token ids in and out only.
        expose_http_server: OpenAI-compatible HTTP server on every shard.
        http_server_api_key_required: The server and router demand a bearer key.
        http_server_api_key: Set by :func:`http_server_api_key_and_worker_config` in the copy that
            goes to the workers; never part of a configuration, nor of ``repr`` and ``to_dict``.
        enable_return_routed_experts: Return expert routes for router replay.
        enable_vllm_metrics_logger: Sample engine gauges in a background thread.
        vllm_metrics_logger_interval: Seconds between samples.
        refit_with_reload_api: Refit through vLLM's own weight reload.
        env_vars: Environment of every worker.
    """

    tensor_parallel_size: int
    gpu_memory_utilization: float
    max_model_len: int
    pipeline_parallel_size: int = 1
    expert_parallel_size: int = 1
    async_engine: bool = False
    precision: str = "auto"
    load_format: str | None = None
    kv_cache_dtype: str = "auto"
    enforce_eager: bool = False
    skip_tokenizer_init: bool = False
    expose_http_server: bool = False
    http_server_api_key_required: bool = False
    http_server_api_key: str | None = dataclasses.field(default=None, repr=False)
    enable_return_routed_experts: bool = False
    enable_vllm_metrics_logger: bool = False
    vllm_metrics_logger_interval: float = 0.5
    refit_with_reload_api: bool = False
    env_vars: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class VllmConfig:
    """Everything ``VllmGeneration`` is built from.

    Attributes:
        model_name: Checkpoint name or folder.
        max_new_tokens: Longest response, tokens.
        vllm_cfg: Engine settings.
        temperature: Sampling temperature, at least 0.
        top_p: Nucleus mass in (0, 1].
        top_k: None or -1 for all tokens, else at least 1.
        stop_token_ids: Token ids that end a response.
        stop_strings: Strings that end a response, added to per-sample ones.
        pad_token_id: Fills ``output_ids`` after each response.
        colocated: Trainer and engines share devices.
        refit_transport: ``ipc``, ``broadcast`` or ``reshard``; None takes ``ipc`` when colocated,
            else ``broadcast``.
        quant_cfg: Name of a quantization recipe that needs its own worker class.
        draft_refit: Refits also update a separate draft model.
        mtp_refit: Refits also update MTP layers.
        vllm_kwargs: Further engine arguments, passed to vLLM as they are.
    """

    model_name: str
    max_new_tokens: int
    vllm_cfg: VllmSpecificArgs
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    pad_token_id: int = 0
    colocated: bool = False
    refit_transport: str | None = None
    quant_cfg: str | None = None
    draft_refit: bool = False
    mtp_refit: bool = False
    vllm_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> VllmConfig:
        """Builds a checked config from a plain mapping.

        ``colocated`` may be a bool or a mapping with ``enabled``; lists become tuples, and None
        for a list of stops means no stops.

        Raises:
            GenerationConfigError: Unknown or missing names, wrong types, or values that cannot
                work.
        """
        outer, problems = dict(settings), []
        inner = outer.pop("vllm_cfg", None)
        if inner is not None and not isinstance(inner, Mapping):
            problems.append(f"vllm_cfg must be a mapping, got {type(inner).__name__}")
        inner = inner if isinstance(inner, Mapping) else {}
        if isinstance(outer.get("colocated"), Mapping):
            outer["colocated"] = outer["colocated"].get("enabled")
        for name in ("stop_token_ids", "stop_strings"):
            if outer.get(name, ()) is None:
                del outer[name]
        problems += _name_problems(cls, settings, "") + _name_problems(
            VllmSpecificArgs, inner, "vllm_cfg."
        )
        top, wrong_top = _typed(cls, outer, "")
        engine, wrong_engine = _typed(VllmSpecificArgs, inner, "vllm_cfg.")
        problems += wrong_top + wrong_engine
        if "http_server_api_key" in inner:
            problems.append(
                "vllm_cfg.http_server_api_key must not be configured (configurations are saved and "
                "logged); set http_server_api_key_required=True and a key is generated"
            )
        if problems:
            raise GenerationConfigError("generation config", problems)
        config = cls(vllm_cfg=VllmSpecificArgs(**engine), **top)
        config.check()
        return config

    def to_dict(self) -> dict[str, Any]:
        """Returns a plain dict for saving and logging; it never holds the API key."""
        saved = dataclasses.asdict(self)
        del saved["vllm_cfg"]["http_server_api_key"]
        return saved

    @property
    def engine_world_size(self) -> int:
        """Workers of one shard, ``tp * pp``."""
        return self.vllm_cfg.tensor_parallel_size * self.vllm_cfg.pipeline_parallel_size

    @property
    def routed(self) -> bool:
        """Whether outputs carry the expert routes of their tokens."""
        return self.vllm_cfg.enable_return_routed_experts

    @property
    def transport(self) -> str:
        """The refit transport with the default resolved."""
        return self.refit_transport or ("ipc" if self.colocated else "broadcast")

    @property
    def requires_kv_scale_sync(self) -> bool:
        """True only for per-tensor FP8 KV caches, the ones with ``k_scale`` and ``v_scale``."""
        return self.vllm_cfg.kv_cache_dtype in _KV_DTYPES_WITH_SCALES

    def check(self, world_size: int | None = None) -> None:
        """Checks all values, and that whole shards fill ``world_size`` workers when given.

        Raises:
            GenerationConfigError: Lists every violation.
        """
        problems = self._value_problems() + self._parallel_problems()
        if world_size is not None and not problems:
            each = self.engine_world_size
            if world_size < each or world_size % each:
                problems.append(
                    f"{world_size} workers are no whole number of shards of {each} "
                    "(tensor_parallel_size * pipeline_parallel_size)"
                )
        if problems:
            raise GenerationConfigError("generation config", problems)

    def _value_problems(self) -> list[str]:
        engine = self.vllm_cfg
        problems: list[str] = []
        if not self.model_name:
            problems.append("model_name must name a checkpoint")
        problems += _below_one(self, "max_new_tokens")
        problems += _below_one(engine, "max_model_len", prefix="vllm_cfg.")
        if self.temperature < 0:
            problems.append(f"temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k is not None and self.top_k != -1 and self.top_k < 1:
            problems.append(f"top_k must be None, -1 or at least 1, got {self.top_k}")
        if not 0 < engine.gpu_memory_utilization <= 1:
            problems.append(
                f"vllm_cfg.gpu_memory_utilization must be in (0, 1], got "
                f"{engine.gpu_memory_utilization}"
            )
        if engine.vllm_metrics_logger_interval <= 0:
            problems.append(
                f"vllm_cfg.vllm_metrics_logger_interval must be above 0 seconds, got "
                f"{engine.vllm_metrics_logger_interval}"
            )
        if self.refit_transport is not None and self.refit_transport not in REFIT_TRANSPORTS:
            problems.append(
                f"refit_transport must be one of {', '.join(REFIT_TRANSPORTS)} or None, got "
                f"{self.refit_transport!r}"
            )
        if engine.expose_http_server and not engine.async_engine:
            problems.append("vllm_cfg.expose_http_server needs vllm_cfg.async_engine=True")
        if engine.expose_http_server and engine.skip_tokenizer_init:
            problems.append("vllm_cfg.expose_http_server needs vllm_cfg.skip_tokenizer_init=False")
        if engine.enable_vllm_metrics_logger and not engine.async_engine:
            problems.append("vllm_cfg.enable_vllm_metrics_logger needs vllm_cfg.async_engine=True")
        return problems

    def _parallel_problems(self) -> list[str]:
        engine = self.vllm_cfg
        problems: list[str] = []
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
            problems += _below_one(engine, name, prefix="vllm_cfg.")
        if problems:
            return problems
        tp, ep = engine.tensor_parallel_size, engine.expert_parallel_size
        if engine.pipeline_parallel_size > 1 and not engine.async_engine:
            problems.append(
                f"vllm_cfg.pipeline_parallel_size={engine.pipeline_parallel_size} needs "
                "vllm_cfg.async_engine=True"
            )
        if engine.pipeline_parallel_size > 1 and self.routed:
            problems.append(
                "vllm_cfg.enable_return_routed_experts needs vllm_cfg.pipeline_parallel_size=1: "
                "vLLM records none over pipeline stages"
            )
        if ep > 1 and ep % tp:
            problems.append(
                f"vllm_cfg.expert_parallel_size={ep} must be a multiple of "
                f"vllm_cfg.tensor_parallel_size={tp}"
            )
        if ep > 1 and ep != tp and engine.async_engine:
            problems.append(
                f"vllm_cfg.expert_parallel_size={ep} other than tensor_parallel_size={tp} is not "
                "possible with vllm_cfg.async_engine=True: engines of one expert group must step "
                "together"
            )
        return problems


def _below_one(config: object, name: str, prefix: str = "") -> list[str]:
    value = getattr(config, name)
    return [] if value >= 1 else [f"{prefix}{name} must be at least 1, got {value}"]


def _name_problems(cls: type, settings: Mapping[str, Any], prefix: str) -> list[str]:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    required = {
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    problems = []
    missing = sorted(required - set(settings))
    if missing:
        provided = ", ".join(sorted(settings)) or "nothing"
        problems.append(
            f"missing {', '.join(prefix + name for name in missing)} (provided: {provided})"
        )
    for name in sorted(set(settings) - set(fields)):
        near = difflib.get_close_matches(name, fields, n=1)
        hint = f"; did you mean {prefix}{near[0]}?" if near else ""
        problems.append(f"unknown {prefix}{name}{hint}")
    return problems


def _typed(cls: type, settings: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], list[str]]:
    """Converts known settings to their field types; returns them and what could not be."""
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in settings.items():
        if name in hints:
            try:
                values[name] = msgspec.convert(value, hints[name])
            except msgspec.ValidationError as error:
                problems.append(f"{prefix}{name}: {error}")
    return values, problems
