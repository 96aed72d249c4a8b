"""The fleet's config: from a plain dict, checked in full, saved without the key."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from generation.config import VllmConfig
from generation.errors import GenerationConfigError
from weight_sync.errors import ConfigError


def settings(engine: dict[str, Any] | None = None, **outer: Any) -> dict[str, Any]:
    """Returns valid settings with the given ones changed."""
    vllm_cfg = {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.5, "max_model_len": 64}
    return {
        "model_name": "tiny",
        "max_new_tokens": 8,
        "vllm_cfg": vllm_cfg | (engine or {}),
        **outer,
    }


def test_valid_settings_become_a_config_with_tuples() -> None:
    config = VllmConfig.from_dict(settings(stop_token_ids=[2, 3], stop_strings=None))
    assert (config.stop_token_ids, config.stop_strings) == ((2, 3), ())


def test_saved_settings_build_the_same_config() -> None:
    config = VllmConfig.from_dict(settings({"async_engine": True}, top_k=5, colocated=True))
    assert VllmConfig.from_dict(config.to_dict()) == config


def test_colocated_is_read_from_a_mapping_with_enabled() -> None:
    assert VllmConfig.from_dict(settings(colocated={"enabled": True})).colocated is True


def test_missing_names_are_listed_with_the_provided_ones() -> None:
    with pytest.raises(GenerationConfigError, match=r"missing max_new_tokens, vllm_cfg") as caught:
        VllmConfig.from_dict({"model_name": "tiny"})
    assert "provided: model_name" in str(caught.value)


def test_missing_top_p_does_not_hide_other_missing_names() -> None:
    with pytest.raises(GenerationConfigError, match=r"missing vllm_cfg\.max_model_len"):
        VllmConfig.from_dict(
            {
                "model_name": "tiny",
                "max_new_tokens": 1,
                "vllm_cfg": {"tensor_parallel_size": 1, "gpu_memory_utilization": 0.5},
            }
        )


def test_misspelt_name_is_refused_with_the_near_one() -> None:
    with pytest.raises(GenerationConfigError, match=r"did you mean vllm_cfg\.async_engine\?"):
        VllmConfig.from_dict(settings({"async_engin": True}))


def test_wrong_type_is_refused_by_name() -> None:
    with pytest.raises(GenerationConfigError, match=r"vllm_cfg\.max_model_len: Expected `int`"):
        VllmConfig.from_dict(settings({"max_model_len": "64"}))


def test_vllm_cfg_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(GenerationConfigError, match="vllm_cfg must be a mapping, got list"):
        VllmConfig.from_dict({**settings(), "vllm_cfg": []})


def test_configured_api_key_is_refused() -> None:
    with pytest.raises(GenerationConfigError, match="must not be configured"):
        VllmConfig.from_dict(settings({"http_server_api_key": "secret"}))


def test_all_violations_are_listed_at_once() -> None:
    with pytest.raises(GenerationConfigError) as caught:
        VllmConfig.from_dict(settings({"pipeline_parallel_size": 2}, top_p=0.0, top_k=0))
    assert len(caught.value.violations) == 3


@pytest.mark.parametrize(
    ("outer", "engine", "message"),
    [
        ({"top_k": 0}, {}, "top_k must be"),
        ({"top_k": -2}, {}, "top_k must be"),
        ({"top_p": 0.0}, {}, "top_p must be"),
        ({"top_p": 1.5}, {}, "top_p must be"),
        ({"temperature": -1.0}, {}, "temperature must be"),
        ({"max_new_tokens": 0}, {}, "max_new_tokens must be"),
        ({"model_name": ""}, {}, "model_name must"),
        ({"refit_transport": "nfs"}, {}, "refit_transport must be one of"),
        ({}, {"gpu_memory_utilization": 0.0}, "gpu_memory_utilization must be"),
        ({}, {"tensor_parallel_size": 0}, "tensor_parallel_size must be"),
        ({}, {"max_model_len": 0}, "max_model_len must be"),
        ({}, {"vllm_metrics_logger_interval": 0.0}, "interval must be above 0"),
        ({}, {"expose_http_server": True}, "expose_http_server needs vllm_cfg.async_engine"),
        ({}, {"enable_vllm_metrics_logger": True}, "metrics_logger needs vllm_cfg.async_engine"),
        ({}, {"pipeline_parallel_size": 2}, "pipeline_parallel_size=2 needs"),
        ({}, {"tensor_parallel_size": 2, "expert_parallel_size": 3}, "must be a multiple"),
        ({}, {"expert_parallel_size": 2, "async_engine": True}, "is not possible with"),
        (
            {},
            {"expose_http_server": True, "async_engine": True, "skip_tokenizer_init": True},
            "needs vllm_cfg.skip_tokenizer_init=False",
        ),
    ],
)
def test_impossible_value_is_refused(
    outer: dict[str, Any], engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        VllmConfig.from_dict(settings(engine, **outer))


@pytest.mark.parametrize("top_k", [None, -1, 1, 50])
def test_usable_top_k_is_accepted(top_k: int | None) -> None:
    assert VllmConfig.from_dict(settings(top_k=top_k)).top_k == top_k


@pytest.mark.parametrize("world_size", [0, 1, 3])
def test_world_size_must_be_whole_shards(world_size: int) -> None:
    config = VllmConfig.from_dict(settings({"tensor_parallel_size": 2}))
    with pytest.raises(ConfigError, match=f"{world_size} workers are no whole number of shards"):
        config.check(world_size)


def test_world_size_of_whole_shards_is_accepted() -> None:
    config = VllmConfig.from_dict(
        settings({"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "async_engine": True})
    )
    config.check(world_size=8)
    assert config.engine_world_size == 4


@pytest.mark.parametrize(
    ("dtype", "needed"),
    [("auto", False), ("fp8", True), ("fp8_e4m3", True), ("fp8_per_token_head", False)],
)
def test_only_per_tensor_fp8_caches_need_scales(dtype: str, needed: bool) -> None:
    config = VllmConfig.from_dict(settings({"kv_cache_dtype": dtype}))
    assert config.requires_kv_scale_sync is needed


@pytest.mark.parametrize(
    ("colocated", "chosen", "transport"),
    [(True, None, "ipc"), (False, None, "broadcast"), (False, "reshard", "reshard")],
)
def test_transport_defaults_by_topology(colocated: bool, chosen: str, transport: str) -> None:
    config = VllmConfig.from_dict(settings(colocated=colocated, refit_transport=chosen))
    assert config.transport == transport


def test_key_is_neither_in_repr_nor_in_saved_settings() -> None:
    plain = VllmConfig.from_dict(settings())
    engine = dataclasses.replace(plain.vllm_cfg, http_server_api_key="secret")
    config = dataclasses.replace(plain, vllm_cfg=engine)
    assert "secret" not in repr(config) + repr(config.to_dict())
