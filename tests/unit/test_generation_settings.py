"""Rules over several settings: controller loop, reload refits, HTTP keys, worker classes."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest

from generation import settings as rules
from generation.config import VllmConfig, VllmSpecificArgs
from generation.errors import GenerationConfigError


def config(engine: dict[str, Any] | None = None, **outer: Any) -> VllmConfig:
    """Returns a config that an asynchronous controller accepts, with settings changed."""
    args = {"async_engine": True, "expose_http_server": True} | (engine or {})
    return VllmConfig("tiny", 8, VllmSpecificArgs(1, 0.5, 64, **args), **outer)


def test_good_controller_settings_pass() -> None:
    rules.validate_settings(rules.ControllerSettings(config(), use_router=True))


def test_controller_violations_are_listed_at_once() -> None:
    bad = config({"async_engine": False, "expose_http_server": False}, colocated=True)
    with pytest.raises(GenerationConfigError) as caught:
        rules.validate_settings(rules.ControllerSettings(bad, use_router=True, pause_timeout_s=0.0))
    assert [v.split()[0] for v in caught.value.violations] == [
        "vllm_cfg.async_engine",
        "colocated",
        "use_router",
        "pause_timeout_s",
    ]


def test_key_without_a_server_is_a_controller_violation() -> None:
    bad = config({"expose_http_server": False, "http_server_api_key_required": True})
    with pytest.raises(GenerationConfigError, match="api_key_required needs"):
        rules.validate_settings(rules.ControllerSettings(bad))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_refit_without_a_deadline_is_a_controller_violation(timeout_s: float) -> None:
    with pytest.raises(GenerationConfigError, match="refit_timeout_s must be above 0"):
        rules.validate_settings(rules.ControllerSettings(config(), refit_timeout_s=timeout_s))


def test_reload_rules_do_not_apply_without_reload() -> None:
    rules.assert_reload_refit_config_supported(config(colocated=True, quant_cfg="nvfp4"))


def test_reload_over_broadcast_passes() -> None:
    rules.assert_reload_refit_config_supported(config({"refit_with_reload_api": True}))


@pytest.mark.parametrize(
    ("outer", "message"),
    [
        ({"colocated": True}, "colocated engines"),
        ({"refit_transport": "reshard"}, "writes parts of parameters"),
        ({"quant_cfg": "nvfp4"}, "own weight loading"),
        ({"draft_refit": True}, "draft_refit"),
        (
            {"mtp_refit": True, "vllm_kwargs": {"speculative_config": {"method": "mtp"}}},
            "mtp_refit",
        ),
    ],
)
def test_reload_refuses_what_it_cannot_refit(outer: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationConfigError, match=message):
        rules.assert_reload_refit_config_supported(config({"refit_with_reload_api": True}, **outer))


def test_reload_rules_read_plain_mappings() -> None:
    plain = {"vllm_cfg": {"refit_with_reload_api": True}, "colocated": {"enabled": True}}
    with pytest.raises(GenerationConfigError, match="colocated engines"):
        rules.assert_reload_refit_config_supported(plain)


def test_no_key_required_returns_the_same_object() -> None:
    given = config()
    key, worker = rules.http_server_api_key_and_worker_config(given)
    assert key is None
    assert worker is given


def test_required_key_reaches_only_the_worker_config() -> None:
    given = config({"http_server_api_key_required": True})
    key, worker = rules.http_server_api_key_and_worker_config(given)
    assert isinstance(worker, VllmConfig)
    assert worker.vllm_cfg.http_server_api_key == key
    assert given.vllm_cfg.http_server_api_key is None


def test_required_key_leaves_a_plain_mapping_unmodified() -> None:
    given = {"vllm_cfg": {"http_server_api_key_required": True, "expose_http_server": True}}
    before = copy.deepcopy(given)
    key, worker = rules.http_server_api_key_and_worker_config(given)
    assert given == before
    assert worker["vllm_cfg"]["http_server_api_key"] == key  # type: ignore[index]


def test_keys_differ_between_fleets_and_are_url_safe() -> None:
    given = config({"http_server_api_key_required": True})
    keys = {str(rules.http_server_api_key_and_worker_config(given)[0]) for _ in range(4)}
    assert len(keys) == 4
    assert all(key.replace("-", "").replace("_", "").isalnum() and len(key) > 30 for key in keys)


def test_required_key_without_a_server_is_refused() -> None:
    given = config({"http_server_api_key_required": True, "expose_http_server": False})
    with pytest.raises(GenerationConfigError, match="no server to protect"):
        rules.http_server_api_key_and_worker_config(given)


def test_worker_class_is_the_default_without_quant_cfg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.GENERATION_WORKER_OVERRIDES, "a.Worker", "b.QuantWorker")
    assert rules.resolve_generation_worker_cls("a.Worker", config()) == "a.Worker"


def test_worker_class_is_overridden_with_quant_cfg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rules.GENERATION_WORKER_OVERRIDES, "a.Worker", "b.QuantWorker")
    quantized = dataclasses.replace(config(), quant_cfg="nvfp4")
    assert rules.resolve_generation_worker_cls("a.Worker", quantized) == "b.QuantWorker"


def test_worker_class_without_an_override_stays() -> None:
    assert rules.resolve_generation_worker_cls("a.Other", {"quant_cfg": "nvfp4"}) == "a.Other"
