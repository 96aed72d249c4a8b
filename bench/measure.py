"""Refits running engines again and again, with this library and with what it is compared with."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bench.engines import Fleet, LocalFleet
from bench.group_limit import broadcasts, measure_groups, sends
from bench.keep import keep
from bench.limits import Limit, measure_copies, traffic
from bench.models import Config
from bench.native import NativeSystem, start_natives
from bench.options import Options
from bench.result_json import Measured, describe
from bench.stages import Stages
from bench.trainer_process import BenchTrainer, TrainerProcesses
from weight_sync.plan import Plan
from weight_sync.report import RefitReport
from weight_sync.synchronizer import WeightSynchronizer
from weight_sync.transports.broadcast_layout import broadcast_layout
from weight_sync.transports.registry import GROUPED

if TYPE_CHECKING:
    from vllm import LLM


def measure_engine(options: Options, cfg: Config, llm: LLM) -> dict[str, object]:
    """As :func:`measure_fleet`, for one engine in this process."""
    return measure_fleet(options, cfg, LocalFleet(llm))


def measure_fleet(options: Options, cfg: Config, fleet: Fleet) -> dict[str, object]:
    """Starts trainers, runs everything the options ask for and returns the JSON object."""
    spec = BenchTrainer(cfg, options.trainer_devices, options.device, options.trainer)
    with TrainerProcesses(spec) as trainers:
        return _Run(options, cfg, fleet, trainers).result()


@dataclass
class _Run:
    """One benchmark: versions grow through all of it."""

    options: Options
    cfg: Config
    fleet: Fleet
    trainers: TrainerProcesses
    version: int = 0
    limits: dict[str, Limit] = field(default_factory=dict)

    def result(self) -> dict[str, object]:
        natives = start_natives(self.options, self.cfg, self.fleet, self.trainers)
        before = free_memory(self.options)
        native_seconds: dict[str, list[float]] = {native.name: [] for native in natives}
        measured: list[Measured] = []
        result: dict[str, object] = {}
        for number, transport in enumerate(self.options.transports):
            # Beside the first transport only: they do not depend on it.
            rivals = [] if measured else natives
            measured.append(self._transport(transport, before, rivals, native_seconds))
            result = describe(self.options, self.cfg, self.limits, measured, native_seconds)
            left = self.options.transports[number + 1 :]
            if left:
                keep(self.options.json, result | {"unfinished": left})
        return result

    def _transport(
        self,
        transport: str,
        before: int,
        natives: list[NativeSystem],
        native_seconds: dict[str, list[float]],
    ) -> Measured:
        sync = self._connect(transport)
        self._refit(sync)
        after = free_memory(self.options)
        assert sync.plan is not None
        if not self.limits:
            self.limits = measure_limits(self.options, sync.plan)
        reports: list[RefitReport] = []
        plain: list[RefitReport] = []
        for _ in range(self.options.repeat + 1):
            reports.append(self._refit(sync))
            plain.append(self._refit(sync, verify=False))
            for native in natives:
                native_seconds[native.name].append(native.refit())
                took = native_seconds[native.name][-1]
                print(f"{native.name}: {took * 1e3:.1f} ms", file=sys.stderr, flush=True)
        # A native refit between ours must not have left the engine with other weights.
        final = self._refit(sync)
        sync.shutdown()
        alone = []
        if self.options.trainer.pp > 1 and transport == "reshard":
            stages = Stages(self.options, self.cfg, self.fleet, self.trainers)
            alone = stages.measure(transport, self.version + 1)
            self.version += stages.versions
        return Measured(
            transport=transport,
            limit=self.limits[transport],
            verified=reports[1:],
            plain=plain[1:],
            extra_bytes=before - after,
            final=final.verified,
            alone=alone,
        )

    def _connect(self, transport: str) -> WeightSynchronizer:
        sync = WeightSynchronizer(
            self.trainers.infos, self.fleet.shards, transport=transport, deadline_s=300
        )
        sync.init_communicator()
        return sync

    def _refit(self, sync: WeightSynchronizer, verify: bool = True) -> RefitReport:
        self.version += 1
        self.trainers.ask("publish", self.version)
        report = sync.sync_weights(self.version, verify=verify)
        print(report.line(), file=sys.stderr, flush=True)
        return report


def measure_limits(options: Options, plan: Plan) -> dict[str, Limit]:
    """Limits of this run by what they are for: a transport, or ``stages alone``.

    Where trainers have GPUs of their own the limits of all transports are measured, so that each
    can be seen beside the others'.
    """
    sent = traffic(plan)
    trainers, workers = options.trainer_devices, options.engine_devices
    limits = {"ipc": measure_copies(sent, trainers, workers)}
    if not set(options.transports) & set(GROUPED):
        return limits
    layout = broadcast_layout(plan)
    given = np.bincount(layout.root, layout.nbytes, len(trainers)).astype(np.int64)
    patterns = [sends(sent), broadcasts(given, int(sent.sum()))]
    stages = options.trainer.stages()
    if len(stages) > 1:
        patterns += [sends(_only(sent, ranks)) for ranks in stages]
    measured = measure_groups(patterns, trainers, workers)
    limits |= {"reshard": measured[0], "broadcast": measured[1]}
    for stage, limit in enumerate(measured[2:]):
        limits[f"stage {stage} alone"] = limit
    return limits


def _only(sent: NDArray[np.int64], ranks: range) -> NDArray[np.int64]:
    """The bytes that some ranks send."""
    out = np.zeros_like(sent)
    out[ranks.start : ranks.stop] = sent[ranks.start : ranks.stop]
    return out


def free_memory(options: Options) -> int:
    """Free bytes of the first worker's GPU; 0 on the CPU."""
    if options.device != "cuda":
        return 0
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(0)[0])
