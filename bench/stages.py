"""Pipeline stages one after the other, to compare with all of them in flight together.

Each stage gets a synchronizer of its own that knows the ranks of that stage only, so that its bytes
travel exactly as they do in the whole refit, but alone.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bench.engines import Fleet
from bench.megatron_rank import stage_patterns
from bench.models import Config
from bench.options import Options
from bench.trainer_process import TrainerProcesses
from weight_sync.messages import TrainerEndpointInfo
from weight_sync.synchronizer import WeightSynchronizer


@dataclass(frozen=True)
class StageTime:
    """One stage alone.

    Attributes:
        nbytes: Bytes written into all workers.
        seconds: Median seconds on the wire.
    """

    nbytes: int
    seconds: float


class Stages:
    """The stages of a running trainer.

    Args:
        options: What runs.
        cfg: Configuration of the model.
        fleet: Engines; nothing else may refit them meanwhile.
        trainers: Trainer ranks.
    """

    def __init__(
        self, options: Options, cfg: Config, fleet: Fleet, trainers: TrainerProcesses
    ) -> None:
        self._options, self._fleet, self._trainers = options, fleet, trainers
        infos: list[TrainerEndpointInfo] = trainers.ask("open_stage")  # type: ignore[assignment]
        self._infos = [[infos[rank] for rank in ranks] for ranks in options.trainer.stages()]
        stages = range(options.trainer.pp)
        names = [stage_patterns(cfg, stage, len(stages)) for stage in stages]
        self._others = [
            [n for other in stages if other != stage for n in names[other]] for stage in stages
        ]

    def measure(self, transport: str, first_version: int) -> list[StageTime]:
        """Refits every stage alone, verified once and then timed as unverified refits.

        Args:
            transport: One that has a group per stage.
            first_version: The first of ``versions`` numbers that are used.
        """
        out = []
        version = first_version
        for infos, others in zip(self._infos, self._others, strict=True):
            out.append(self._alone(transport, infos, others, version))
            version += self._options.repeat + 1
        return out

    @property
    def versions(self) -> int:
        """How many versions :meth:`measure` uses."""
        return self._options.trainer.pp * (self._options.repeat + 1)

    def _alone(
        self,
        transport: str,
        infos: Sequence[TrainerEndpointInfo],
        others: Sequence[str],
        version: int,
    ) -> StageTime:
        sync = WeightSynchronizer(
            infos, self._fleet.shards, transport=transport, not_trained=others, deadline_s=300
        )
        seconds, nbytes = [], 0
        try:
            for number in range(self._options.repeat + 1):
                self._trainers.ask("publish", version + number)
                report = sync.sync_weights(version + number, verify=number == 0)
                print(f"alone: {report.line()}", file=sys.stderr, flush=True)
                seconds.append(report.seconds["transfer"])
                nbytes = report.bytes
        finally:
            sync.shutdown()
        return StageTime(nbytes, statistics.median(seconds[1:]))
