"""The helper names of the facade in one place; each lives in the module named after its job."""

from __future__ import annotations

from typing import Any

from generation import routed_experts
from generation.batch import Batch, check_right_padding
from generation.chat import (
    VLLM_LOGPROB_FLOOR,
    attach_token_information_to_chat_response_choices,
    model_dump_chat_response_with_dynamic_message_fields,
)
from generation.config import VllmConfig, VllmSpecificArgs
from generation.metrics import (
    _KEPT_COUNTER_NAMES,
    COUNTER_KEY_SEP,
    HISTOGRAM_COUNT_PART,
    HISTOGRAM_SUM_PART,
    _first_delta,
    _is_kept,
    _mean_from_histogram,
    aggregate_spec_decode_counters,
    compute_engine_step_metrics,
    compute_spec_decode_metrics,
    encode_counter_key,
    flatten_engine_metrics,
)
from generation.naming import (
    _GROUPED_MOE_EXPERT_WEIGHT_SUFFIXES,
    _format_refit_key_error,
    is_grouped_moe_expert_weight_name,
)
from generation.placeholders import (
    PrefixSplice,
    _placeholder_range_bounds,
    remap_multimodal_placeholders,
)
from generation.prompts import format_prompt_for_vllm_generation, validate_rollout_prompt
from generation.routed_codec import decode_routed_experts, encode_routed_experts
from generation.routed_experts import (
    R3_MISSING_ROUTE_SENTINEL,
    _as_routed_experts_tensor,
    attach_routed_experts_to_chat_response_choices,
    pad_and_align_routed_expert_indices,
    reset_routed_experts_range_check,
)
from generation.settings import (
    GENERATION_WORKER_OVERRIDES,
    ControllerSettings,
    assert_reload_refit_config_supported,
    http_server_api_key_and_worker_config,
    resolve_generation_worker_cls,
    validate_settings,
)
from generation.telemetry import TelemetrySink, _record_vllm_generation_metrics

__all__ = [
    "COUNTER_KEY_SEP",
    "GENERATION_WORKER_OVERRIDES",
    "HISTOGRAM_COUNT_PART",
    "HISTOGRAM_SUM_PART",
    "R3_MISSING_ROUTE_SENTINEL",
    "VLLM_LOGPROB_FLOOR",
    "_GROUPED_MOE_EXPERT_WEIGHT_SUFFIXES",
    "_KEPT_COUNTER_NAMES",
    "Batch",
    "ControllerSettings",
    "PrefixSplice",
    "TelemetrySink",
    "VllmConfig",
    "VllmSpecificArgs",
    "_as_routed_experts_tensor",
    "_first_delta",
    "_format_refit_key_error",
    "_is_kept",
    "_mean_from_histogram",
    "_placeholder_range_bounds",
    "_record_vllm_generation_metrics",
    "aggregate_spec_decode_counters",
    "assert_reload_refit_config_supported",
    "attach_routed_experts_to_chat_response_choices",
    "attach_token_information_to_chat_response_choices",
    "check_right_padding",
    "compute_engine_step_metrics",
    "compute_spec_decode_metrics",
    "decode_routed_experts",
    "encode_counter_key",
    "encode_routed_experts",
    "flatten_engine_metrics",
    "format_prompt_for_vllm_generation",
    "http_server_api_key_and_worker_config",
    "is_grouped_moe_expert_weight_name",
    "model_dump_chat_response_with_dynamic_message_fields",
    "pad_and_align_routed_expert_indices",
    "remap_multimodal_placeholders",
    "reset_routed_experts_range_check",
    "resolve_generation_worker_cls",
    "validate_rollout_prompt",
    "validate_settings",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - the type of the name asked for
    """Reads the one name that changes where it lives, as an import would freeze its value."""
    if name == "G_ROUTED_EXPERTS_RANGE_CHECKED":
        return routed_experts.G_ROUTED_EXPERTS_RANGE_CHECKED
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
