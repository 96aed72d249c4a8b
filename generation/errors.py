"""Errors of the facade that also answer to the builtin type its callers already catch.

Training loops written for other vLLM wrappers catch ``ValueError`` or ``RuntimeError`` here; these
classes keep that working while every one of them is still a :class:`WeightSyncError`.
"""

from __future__ import annotations

from weight_sync.errors import (
    ConfigError,
    EngineStateError,
    GenerationUnavailableError,
    WeightSyncError,
)


class GenerationConfigError(ConfigError, ValueError):
    """Settings that cannot work; the message lists every violation, not only the first.

    Attributes:
        violations: One sentence per setting that is wrong.
    """

    def __init__(self, subject: str, violations: list[str]) -> None:
        self.subject = subject
        self.violations = tuple(violations)
        listed = "".join(f"\n  - {violation}" for violation in violations)
        super().__init__(
            f"{subject}: correct {len(violations)} setting(s), nothing was started:{listed}"
        )

    def __reduce__(self) -> tuple[type[GenerationConfigError], tuple[str, list[str]]]:
        """Rebuilds from the two arguments, so that the error survives a process boundary."""
        return (type(self), (self.subject, list(self.violations)))


class InvalidRolloutError(WeightSyncError, ValueError):
    """A batch, prompt, placeholder or route tensor that contradicts itself or another."""


class EngineOutputError(WeightSyncError, RuntimeError):
    """Engine output that lacks, or contradicts, something it was asked to return."""


class NoHealthyShardsError(GenerationUnavailableError, RuntimeError):
    """No shard may be handed a request right now; a restart or a refit can change that."""


class GenerationFleetExhausted(GenerationUnavailableError, RuntimeError):
    """Too few shards are left for the run to be worth continuing."""


class FleetStateError(EngineStateError, RuntimeError):
    """A call that the fleet cannot serve as it is: wrong kind of engine, or no workers."""
