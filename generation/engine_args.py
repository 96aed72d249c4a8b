"""Engine and sampling arguments for vLLM, from the facade's configuration; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from generation.config import VllmConfig
from generation.errors import InvalidRolloutError

WORKER_EXTENSION = "weight_sync.vllm.worker_extension.WeightSyncExtension"
EXECUTORS = {1: "uni"}


def engine_arguments(config: VllmConfig, shard: int, *, sleep_mode: bool) -> dict[str, Any]:
    """Arguments of vLLM's ``LLM`` or ``AsyncEngineArgs``.

    Args:
        config: The fleet's config.
        shard: The shard; it shifts the seed, so that shards given one prompt answer differently.
        sleep_mode: Whether the platform can free memory while asleep and the config is colocated.

    Returns:
        Keyword arguments; ``config.vllm_kwargs`` wins over everything but what refits need.
    """
    engine = config.vllm_cfg
    fp8 = engine.precision == "fp8"
    arguments: dict[str, Any] = {
        "model": config.model_name,
        "dtype": "bfloat16" if fp8 else engine.precision,
        "load_format": engine.load_format or "auto",
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "enable_expert_parallel": engine.expert_parallel_size > 1,
        "gpu_memory_utilization": engine.gpu_memory_utilization,
        "max_model_len": engine.max_model_len,
        "kv_cache_dtype": engine.kv_cache_dtype,
        "enforce_eager": engine.enforce_eager,
        "skip_tokenizer_init": engine.skip_tokenizer_init,
        "enable_sleep_mode": sleep_mode,
        "disable_log_stats": False,
        # A worker process per rank: the leader's own process never touches the device, and a shard
        # of one worker needs no second process.
        "distributed_executor_backend": EXECUTORS.get(config.engine_world_size, "mp"),
    }
    if fp8:
        arguments["quantization"] = "fp8"
    if engine.enable_return_routed_experts:
        arguments["enable_return_routed_experts"] = True
    arguments.update(config.vllm_kwargs)
    arguments["seed"] = int(config.vllm_kwargs.get("seed", 0)) + shard
    arguments["worker_extension_cls"] = WORKER_EXTENSION
    return arguments


def own_setting(data: Mapping[str, Any], column: str, sample: int) -> Any:  # noqa: ANN401 - as stored
    """A sample's entry of an optional column; None without that column."""
    return data[column][sample] if column in data else None


def max_tokens(config: VllmConfig, prompt_tokens: int, asked: int | None = None) -> int:
    """Tokens a response may have: never more than still fit the model length; 0 is possible.

    Args:
        config: The fleet's config.
        prompt_tokens: Length of the prompt, tokens; 0 when unknown.
        asked: The sample's own limit; it only lowers the configured one.

    Raises:
        InvalidRolloutError: ``asked`` is below 1.
    """
    if asked is not None and asked < 1:
        raise InvalidRolloutError(
            f"max_new_tokens of a sample must be at least 1, got {asked}; leave such samples out"
        )
    room = config.vllm_cfg.max_model_len - prompt_tokens
    wanted = config.max_new_tokens if asked is None else min(config.max_new_tokens, asked)
    return max(min(wanted, room), 0)


def sampling_arguments(
    config: VllmConfig,
    *,
    greedy: bool,
    stop_strings: Iterable[str] | None,
    prompt_tokens: int,
    max_new_tokens: int | None = None,
) -> dict[str, Any]:
    """Arguments of vLLM's ``SamplingParams`` for one sample.

    Args:
        config: The fleet's config.
        greedy: Take the most likely token instead of sampling.
        stop_strings: The sample's own stop strings, added to the configured ones.
        prompt_tokens: Length of its prompt, tokens; 0 when unknown.
        max_new_tokens: The sample's own limit, as in :func:`max_tokens`.

    Raises:
        InvalidRolloutError: Stop strings for an engine that has no tokenizer, or a limit below 1.
    """
    stops = sorted(set(config.stop_strings) | set(stop_strings or ()))
    text = not config.vllm_cfg.skip_tokenizer_init
    if stops and not text:
        raise InvalidRolloutError(
            f"stop strings {stops} need the engine's tokenizer; set "
            "vllm_cfg.skip_tokenizer_init=False or use stop_token_ids"
        )
    top_k = -1 if config.top_k is None else config.top_k
    return {
        "temperature": 0.0 if greedy else config.temperature,
        "top_p": 1.0 if greedy else config.top_p,
        "top_k": 1 if greedy else top_k,
        "max_tokens": max_tokens(config, prompt_tokens, max_new_tokens),
        "logprobs": 0,
        "stop_token_ids": list(config.stop_token_ids) or None,
        "stop": stops or None,
        "include_stop_str_in_output": bool(stops),
        "detokenize": text,
    }
