"""Trainer grids against engine fleets on 4 and 8 GPUs: every worker equal to a fresh engine's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.engine_process import EngineProcess
from bench.engines import prepare_environment
from bench.fault_injection import Fault, Injector
from bench.grid_cases import CASES, Case
from bench.grids import EngineGrid, TrainerGrid, engine_devices, engine_grid, trainer_grid
from bench.models import config, write_checkpoint
from bench.trainer_process import BenchTrainer, TrainerProcesses
from bench.values import whole
from tests.harness.gpu_engines import Bits, changed
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = [pytest.mark.multi_gpu, pytest.mark.timeout(600)]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Every stream has several buckets, and the largest tensors are larger than one.
BUCKET = 32 << 10
KV_BYTES = 1 << 30


def needing(cases: Sequence[Case]) -> list[object]:
    """Parameters that are skipped where there are too few GPUs."""
    here = torch.cuda.device_count()
    return [
        pytest.param(
            case,
            id=case.name,
            marks=pytest.mark.skipif(
                here < case.gpus, reason=f"needs {case.gpus} CUDA devices, this machine has {here}"
            ),
        )
        for case in cases
    ]


class World:
    """The trainers and engines of one case, and what fresh engines are.

    Values 0 are what engines start from, values 1 are other ones.
    """

    def __init__(self, case: Case, folder: Path) -> None:
        self.cfg = config(case.tiny)
        self.trainer: TrainerGrid = trainer_grid(case.trainer, self.cfg)
        self.engine: EngineGrid = engine_grid(case.engine, self.cfg)
        self.versions = itertools.count(1)
        self._folders = [
            write_checkpoint(self.cfg, whole(self.cfg, values), folder / str(values))
            for values in (0, 1)
        ]
        self._devices = engine_devices(self.engine, DEVICE)
        spec = BenchTrainer(self.cfg, self._trainer_devices(), DEVICE, self.trainer)
        self.trainers = TrainerProcesses(spec)
        self.shards: list[EngineProcess] = []
        try:
            fresh = self.start(0, 1).ready()
            disk = bits(fresh)
            fresh.close()
            self.shards = [self.start(shard, 0) for shard in range(self.engine.dp)]
            self.truth = [bits(self.shards[0].ready()), disk]
            for shard in self.shards:
                shard.ready()
        except BaseException:
            self.close()
            raise

    def _trainer_devices(self) -> tuple[str, ...]:
        if DEVICE == "cpu":
            return ("cpu",) * self.trainer.ranks
        first = self.engine.workers
        return tuple(f"cuda:{first + rank}" for rank in range(self.trainer.ranks))

    def start(self, shard: int, values: int) -> EngineProcess:
        """A shard that loads values from disk, on the GPUs of its number."""
        arguments: dict[str, Any] = {
            "model": str(self._folders[values]),
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "max_model_len": 256,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": KV_BYTES,
            "tensor_parallel_size": self.engine.tp,
            "enable_expert_parallel": self.engine.expert,
            "disable_custom_all_reduce": True,
            "worker_extension_cls": "tests.harness.gpu_engines.ObservedExtension",
        }
        if self.engine.tp > 1:
            arguments["distributed_executor_backend"] = "mp"
        if DEVICE == "cuda":
            arguments["gpu_memory_utilization"] = 0.2
        width = self.engine.tp
        return EngineProcess(self._devices[shard * width : (shard + 1) * width], arguments)

    def connect(self, transport: str) -> WeightSynchronizer:
        return WeightSynchronizer(
            self.trainers.infos,
            self.shards,
            transport=transport,
            deadline_s=60,
            bucket_bytes=BUCKET,
        )

    def publish(self, values: int) -> int:
        """All ranks publish values under the next version."""
        version = next(self.versions)
        self.trainers.ask("publish", version, values)
        return version

    def wrong(self, shard: int, values: int) -> list[list[str]]:
        """Names per worker of a shard whose bits are not those of a fresh engine."""
        have = bits(self.shards[shard])
        return [changed(a, b) for a, b in zip(self.truth[values], have, strict=True)]

    def close(self) -> None:
        for shard in self.shards:
            shard.close()
        self.trainers.__exit__()


def observe(llm: Any) -> list[Bits]:
    return llm.collective_rpc("observed_bits")


def bits(shard: EngineProcess) -> list[Bits]:
    """Digests of all parameters and buffers of every worker."""
    return shard.ask("apply", observe)  # type: ignore[return-value]


def arm(llm: Any, fault: Fault) -> None:
    """Makes the only worker of an engine fail."""
    worker = llm.llm_engine.model_executor.driver_worker.worker
    injector = Injector()
    injector.arm(fault)
    worker.__dict__["_weight_sync_agent"]._injected = injector


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    prepare_environment()
    made = World(request.param, tmp_path_factory.mktemp(request.param.name))
    yield made
    made.close()


@pytest.mark.parametrize("world", needing(CASES), indirect=True)
@pytest.mark.parametrize("transport", ["ipc", "broadcast", "reshard"])
def test_every_worker_equals_a_fresh_engine_at_v1_and_again_at_v0(
    world: World, transport: str
) -> None:
    synchronizer = world.connect(transport)
    nothing = [[]] * world.engine.tp
    assert all(world.wrong(0, 1))
    for values in (1, 0):
        report = synchronizer.sync_weights(world.publish(values))
        assert report.verified
        assert report.workers == world.engine.workers
        for shard in range(world.engine.dp):
            assert world.wrong(shard, values) == nothing
    synchronizer.shutdown()


@pytest.mark.parametrize("world", needing(CASES), indirect=True)
def test_each_pipeline_stage_sends_through_a_group_of_its_own(world: World) -> None:
    synchronizer = world.connect("reshard")
    synchronizer.sync_weights(world.publish(0))
    assert synchronizer._conductor is not None
    groups = [group.trainers for group in synchronizer._conductor.groups]
    assert groups == [tuple(ranks) for ranks in world.trainer.stages()]
    assert synchronizer.plan is not None
    assert (synchronizer.plan.sender_bytes() > 0).all()
    synchronizer.shutdown()


LOSABLE = [case for case in CASES if case.engine == "dp=2"]


@pytest.mark.parametrize("world", needing(LOSABLE), indirect=True)
@pytest.mark.parametrize("transport", ["broadcast", "reshard"])
def test_a_shard_killed_in_the_transfer_is_left_out_and_rejoins_when_it_was_restarted(
    world: World, transport: str
) -> None:
    synchronizer = world.connect(transport)
    synchronizer.sync_weights(world.publish(0))
    world.shards[1].ask("apply", arm, Fault("kill", "transfer", offset=1))
    report = synchronizer.sync_weights(world.publish(1))
    assert report.verified
    assert report.absent == (1,)
    assert report.retried
    assert world.wrong(0, 1) == [[]]
    world.shards[1].close()
    world.shards[1] = world.start(1, 0).ready()
    synchronizer.replace_shard(1, world.shards[1])
    report = synchronizer.sync_weights(world.publish(1))
    assert report.verified
    assert report.absent == ()
    assert [world.wrong(shard, 1) for shard in (0, 1)] == [[[]], [[]]]
    # As the next test of this fleet expects it.
    synchronizer.sync_weights(world.publish(0))
    synchronizer.shutdown()
