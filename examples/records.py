"""What the demo measures and writes."""

from __future__ import annotations

import msgspec


class StepRecord(msgspec.Struct, frozen=True):
    """One refit and what was sampled with it.

    Attributes:
        version: Weight version that the refit brought.
        reward: Mean reward of completions sampled with that version.
        refit_ms: Milliseconds of the whole refit, as the caller waited for it.
        stages: Milliseconds of each stage.
        bytes: Bytes moved.
        verified: Whether every worker's digest agreed with the trainer's.
        stamped: Whether every token sampled after it carries that version.
        logprob_gap: Mean over the sampled tokens of |trainer - engine| log-probability, both with
            that version.
    """

    version: int
    reward: float
    refit_ms: float
    stages: dict[str, float]
    bytes: int
    verified: bool
    stamped: bool
    logprob_gap: float

    def line(self) -> str:
        """The record as one line for a person."""
        stages = " ".join(f"{name} {ms:.0f}" for name, ms in self.stages.items())
        return (
            f"version {self.version}  reward {self.reward:.3f}  refit {self.refit_ms:.0f} ms "
            f"({stages})  {self.bytes / 1e6:.1f} MB  verified {self.verified}  "
            f"logprob gap {self.logprob_gap:.4f}"
        )


class Result(msgspec.Struct, frozen=True):
    """What the demo writes, as JSON."""

    model: str
    steps: list[StepRecord]
    final_tokens_match: bool

    @property
    def good(self) -> bool:
        """Whether the run showed what it is meant to show."""
        return self.final_tokens_match and all(s.verified and s.stamped for s in self.steps)
