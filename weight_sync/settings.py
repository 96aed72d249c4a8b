"""Refuses settings of a synchronizer that cannot work, all at once, before anything is touched."""

from __future__ import annotations

from collections.abc import Sequence

from weight_sync.engine import EngineShard
from weight_sync.errors import ConfigError
from weight_sync.messages import TrainerEndpointInfo
from weight_sync.transports.registry import check_transport


def check_settings(
    trainers: Sequence[TrainerEndpointInfo],
    shards: Sequence[EngineShard],
    transport: str,
    bucket_bytes: int,
    stage_bytes: int | None,
    silence_s: float,
) -> None:
    """Checks what :class:`~weight_sync.synchronizer.WeightSynchronizer` is made with.

    Raises:
        ConfigError: Listing every setting that cannot work.
    """
    problems = []
    try:
        check_transport(transport)
    except ConfigError as error:
        problems.append(str(error))
    ranks = [t.rank for t in trainers]
    if ranks != list(range(len(trainers))) or not trainers:
        problems.append(f"trainers must be ranks 0..n-1 in order, not {ranks}")
    widths = [s.workers for s in shards]
    if not shards or len(set(widths)) > 1:
        problems.append(f"shards must be at least one and have equally many workers, not {widths}")
    if bucket_bytes < 1:
        problems.append(f"bucket_bytes must be positive, not {bucket_bytes}")
    if stage_bytes is not None and stage_bytes < 1:
        problems.append(f"stage_bytes must be positive, not {stage_bytes}")
    if silence_s <= 0:
        problems.append(f"silence_s must be positive, not {silence_s}")
    if problems:
        raise ConfigError("; ".join(problems))
