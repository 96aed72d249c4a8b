"""Rules that join several settings: the controller loop, reload refits, HTTP keys, worker classes.

The last three also take the plain mapping that a configuration file gives, with the same names.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from generation.config import VllmConfig
from generation.errors import GenerationConfigError

ConfigLike = VllmConfig | Mapping[str, Any]

_MTP_METHODS = ("mtp", "deepseek_mtp")


GENERATION_WORKER_OVERRIDES: dict[str, str] = {}
"""Worker class path to the class path that replaces it when ``quant_cfg`` is set. Empty here: an
integration that needs its own worker adds its entry. Paths are text, so nothing is imported."""


@dataclasses.dataclass(frozen=True)
class ControllerSettings:
    """What an asynchronous controller loop asks of the fleet.

    Attributes:
        generation: The fleet's config.
        token_capture: Record every served token with its weight version.
        use_router: Rollouts go through the HTTP router.
        pause_timeout_s: Deadline of a pause or resume, seconds.
        refit_timeout_s: Deadline of one refit inside the workers, seconds.
    """

    generation: VllmConfig
    token_capture: bool = False
    use_router: bool = False
    pause_timeout_s: float = 60.0
    refit_timeout_s: float = 300.0


def validate_settings(settings: ControllerSettings) -> None:
    """Refuses settings that an asynchronous loop cannot honour; needs no device and no model.

    Raises:
        GenerationConfigError: Lists every violation.
    """
    config, engine = settings.generation, settings.generation.vllm_cfg
    problems: list[str] = []
    if not engine.async_engine:
        problems.append("vllm_cfg.async_engine must be True: refits happen while requests run")
    if config.colocated:
        problems.append(
            "colocated must be False: the trainer steps while the engines generate, they cannot "
            "share devices"
        )
    if settings.use_router and not engine.expose_http_server:
        problems.append("use_router needs vllm_cfg.expose_http_server=True")
    if engine.http_server_api_key_required and not engine.expose_http_server:
        problems.append(
            "vllm_cfg.http_server_api_key_required needs vllm_cfg.expose_http_server=True"
        )
    for name in ("pause_timeout_s", "refit_timeout_s"):
        if not getattr(settings, name) > 0:
            problems.append(
                f"{name} must be above 0 seconds, got {getattr(settings, name)}: nothing waits "
                "without a deadline"
            )
    if problems:
        raise GenerationConfigError("asynchronous controller settings", problems)


def assert_reload_refit_config_supported(config: ConfigLike) -> None:
    """Refuses what cannot be refitted through vLLM's own weight reload.

    Does nothing unless ``vllm_cfg.refit_with_reload_api`` is set.

    Raises:
        GenerationConfigError: Lists every violation.
    """
    if not _read(config, "vllm_cfg", "refit_with_reload_api"):
        return
    problems: list[str] = []
    shared = _read(config, "colocated")
    if shared["enabled"] if isinstance(shared, Mapping) else shared:
        problems.append("colocated engines are refitted over ipc, which does not reload")
    transport = _read(config, "refit_transport")
    if transport not in (None, "broadcast"):
        problems.append(
            f"refit_transport={transport!r} writes parts of parameters; reload needs whole tensors "
            "(refit_transport=None or 'broadcast')"
        )
    if _read(config, "quant_cfg") is not None:
        problems.append(f"quant_cfg={_read(config, 'quant_cfg')!r} needs its own weight loading")
    if _read(config, "draft_refit"):
        problems.append("draft_refit: reload reaches the main model only, not a draft model")
    speculative = (_read(config, "vllm_kwargs") or {}).get("speculative_config") or {}
    if speculative.get("method") in _MTP_METHODS and _read(config, "mtp_refit"):
        problems.append("mtp_refit: reload reaches the main model only, not MTP layers")
    if problems:
        raise GenerationConfigError("vllm_cfg.refit_with_reload_api=True", problems)


def http_server_api_key_and_worker_config(
    config: ConfigLike,
) -> tuple[str | None, ConfigLike]:
    """Makes the key of the HTTP servers and the config copy that carries it to the workers.

    The given config never gets the key, so what is saved or logged stays clean. Clients get it from
    the facade.

    Returns:
        ``(None, config)`` with the same object when no key is required; else a random URL-safe key
        and a copy whose ``vllm_cfg.http_server_api_key`` holds it.

    Raises:
        GenerationConfigError: A key is required and no server is exposed.
    """
    if not _read(config, "vllm_cfg", "http_server_api_key_required"):
        return None, config
    if not _read(config, "vllm_cfg", "expose_http_server"):
        raise GenerationConfigError(
            "vllm_cfg.http_server_api_key_required=True",
            ["vllm_cfg.expose_http_server is False, so there is no server to protect; set it"],
        )
    key = secrets.token_urlsafe(32)
    if isinstance(config, VllmConfig):
        engine = dataclasses.replace(config.vllm_cfg, http_server_api_key=key)
        return key, dataclasses.replace(config, vllm_cfg=engine)
    return key, {**config, "vllm_cfg": {**config["vllm_cfg"], "http_server_api_key": key}}


def resolve_generation_worker_cls(default_cls: str, config: ConfigLike) -> str:
    """Returns the worker class path to use: an override only when ``quant_cfg`` is set."""
    if _read(config, "quant_cfg") is None:
        return default_cls
    return GENERATION_WORKER_OVERRIDES.get(default_cls, default_cls)


def _read(config: ConfigLike, *path: str) -> Any:  # noqa: ANN401 - settings are of any type
    value: Any = config
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
    return value
