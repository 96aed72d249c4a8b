"""The one tree of errors this library raises.

Every message names what is known (stage, version, epoch, ranks) and ends with the way out, so that
a person reading only the last line of a log knows what to do next.
"""

from __future__ import annotations

from collections.abc import Iterable


def shorten(names: Iterable[str], limit: int = 8) -> str:
    """Joins at most ``limit`` sorted names, followed by how many more there are."""
    ordered = sorted(names)
    text = ", ".join(ordered[:limit])
    more = len(ordered) - limit
    return f"{text} and {more} more" if more > 0 else text


class WeightSyncError(Exception):
    """Base of every error raised on purpose by this library."""


class ConfigError(WeightSyncError):
    """A setting or combination of settings that cannot work; found before anything live changes."""


class LayoutError(WeightSyncError):
    """Regions, shapes or dtypes that do not describe one consistent model."""


class CoverageError(LayoutError):
    """Names or bytes that one side has and the other does not.

    Attributes:
        unconsumed: Trainer names that no engine loader read.
        unwritten: Engine parameters (or parts of them) that nothing wrote.
        disagreeing: Names whose shape or dtype differ, with both sides.
    """

    def __init__(
        self,
        unconsumed: Iterable[str] = (),
        unwritten: Iterable[str] = (),
        disagreeing: Iterable[str] = (),
    ) -> None:
        self.unconsumed = tuple(sorted(unconsumed))
        self.unwritten = tuple(sorted(unwritten))
        self.disagreeing = tuple(sorted(disagreeing))
        parts = []
        if self.unconsumed:
            parts.append(
                f"trainer names that no engine loader consumed ({len(self.unconsumed)}): "
                f"{shorten(self.unconsumed)}"
            )
        if self.unwritten:
            parts.append(
                f"engine parameters that nothing wrote ({len(self.unwritten)}): "
                f"{shorten(self.unwritten)}"
            )
        if self.disagreeing:
            parts.append(
                f"shape or dtype disagree ({len(self.disagreeing)}): {shorten(self.disagreeing)}"
            )
        super().__init__(
            "; ".join(parts)
            + ". Nothing was changed. Fix the names, or declare them with not_trained=(...) if the "
            "engine should keep its own values."
        )


class ReplicaMismatchError(LayoutError):
    """Two ranks claim the same region of a tensor with different bytes."""


class PlanMismatchError(WeightSyncError):
    """Participants do not hold the same plan; refused before the first byte."""


class MembershipError(WeightSyncError):
    """A membership that cannot exist, or a call that does not fit the current one."""


class NoSurvivingShardsError(MembershipError):
    """Every engine shard is absent."""


class StaleEpochError(MembershipError):
    """A message or handle of an earlier epoch."""


class RefitError(WeightSyncError):
    """A refit that did not end in a committed version.

    Attributes:
        stage: Where it stopped, e.g. ``"transfer"``.
        version: The weight version that was being sent.
        epoch: Membership epoch.
        ranks: Participants at fault or missing, e.g. ``"trainer 1"`` or ``"shard 0 worker 1"``.
    """

    def __init__(
        self,
        reason: str,
        *,
        stage: str,
        version: int | None = None,
        epoch: int | None = None,
        ranks: Iterable[str] = (),
        remedy: str = "",
    ) -> None:
        self.reason = reason
        self.stage = stage
        self.version = version
        self.epoch = epoch
        self.ranks = tuple(ranks)
        self.remedy = remedy
        where = [f"stage={stage}"]
        if version is not None:
            where.append(f"version={version}")
        if epoch is not None:
            where.append(f"epoch={epoch}")
        if self.ranks:
            where.append(f"ranks=[{', '.join(self.ranks)}]")
        advice = f". {remedy}" if remedy else ""
        super().__init__(f"{reason} ({', '.join(where)}){advice}")


class DeadlineError(RefitError):
    """A wait that ended because its deadline passed; names who did not arrive."""


class VerifyError(RefitError):
    """Bytes in the engine that differ from the trainer's; the version was not committed."""


class AbortedError(RefitError):
    """A transfer that was aborted, by a watchdog or because another participant failed."""


class PeerDeadError(RefitError):
    """A participant's process is gone."""


class EngineStateError(WeightSyncError):
    """The engine is in a state that forbids the call (asleep, paused, stale, shut down)."""


class CacheInvalidationError(EngineStateError):
    """The engine refused to drop caches computed with earlier weights."""


class EnvironmentUnsupportedError(ConfigError):
    """Something of the machine (driver, allocator, rights, peer access) forbids the transport."""


class TransportError(WeightSyncError):
    """A transport that cannot do what was asked, outside a refit."""


class QuantizationError(LayoutError):
    """Quantized values, scales or names that do not fit the agreed format."""


class GenerationUnavailableError(WeightSyncError):
    """A request that no engine shard could answer."""
