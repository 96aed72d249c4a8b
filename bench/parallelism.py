"""Reads ``dp=2,tp=4,pp=1,ep=8``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from weight_sync.errors import ConfigError


@dataclass(frozen=True)
class Parallelism:
    """How many ranks of each kind; every kind is 1 unless given.

    Attributes:
        dp: Data parallel replicas; engine shards.
        tp: Tensor parallel ranks.
        pp: Pipeline stages.
        ep: Expert parallel ranks, among those of ``dp * tp``.
        fsdp: Ranks that FSDP2 shards each replica over (trainers only).
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    fsdp: int = 1

    @property
    def ranks(self) -> int:
        """All ranks; expert parallel ranks are those of the other kinds."""
        return self.dp * self.fsdp * self.tp * self.pp

    def __str__(self) -> str:
        """The text it was read from, in one order."""
        return ",".join(
            f"{kind}={size}" for kind, size in asdict(self).items() if size > 1 or kind != "fsdp"
        )


def sizes(text: str, kinds: Sequence[str]) -> dict[str, int]:
    """Reads a comma-separated list of ``kind=size``.

    Args:
        text: E.g. ``"dp=2,tp=4"``; may be empty.
        kinds: Kinds that make sense here.

    Raises:
        ConfigError: If a kind is unknown or comes twice, or a size is no positive integer.
    """
    out: dict[str, int] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        kind, _, size = item.partition("=")
        if kind not in kinds or kind in out or not size.isdecimal() or int(size) < 1:
            raise ConfigError(
                f"{item!r} in {text!r} is not understood; write each of {', '.join(kinds)} at most "
                "once, as kind=size with size >= 1"
            )
        out[kind] = int(size)
    return out


def parse(text: str, kinds: Sequence[str] = ("dp", "tp", "pp", "ep")) -> Parallelism:
    """Reads a comma-separated list of ``kind=size``.

    Args:
        text: E.g. ``"dp=2,tp=4"``; empty means one rank.
        kinds: Kinds that make sense here.

    Raises:
        ConfigError: As :func:`sizes`, or if expert parallel ranks do not divide the ranks of a
            stage.
    """
    out = Parallelism(**sizes(text, kinds))
    if out.ranks // out.pp % out.ep:
        raise ConfigError(
            f"{text!r}: ep={out.ep} must divide the {out.ranks // out.pp} ranks of a stage"
        )
    return out
