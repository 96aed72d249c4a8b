"""Quantizing trainers against stand-in engines: formats, shardings, transports, refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed

from bench.models import Config, config, random_weights
from bench.quantized_models import is_quantized
from tests.harness.local import LocalShard, LocalTrainers
from tests.harness.standin import StandinModel
from tests.harness.standin_models import fused
from tests.harness.standin_quantized import load_quantized, quantized
from tests.harness.trainers import Holder, Trainers, TrainerSpec
from weight_sync.errors import QuantizationError
from weight_sync.quantize.format import Format
from weight_sync.sources.module import ModuleSource
from weight_sync.synchronizer import WeightSynchronizer
from weight_sync.trainer.endpoint import TrainerEndpoint

pytestmark = pytest.mark.timeout(120)

MX, BLOCK, TENSOR = Format.MXFP8, Format.FP8_BLOCK, Format.FP8_TENSOR
SHARDED, REPLICAS = ("fsdp", 2), ("plain", 2)
DENSE, MOE = "tiny-fp8", "tiny-fp8-moe"
CASES = [
    ("ipc", MX, MOE, SHARDED),
    ("ipc", BLOCK, MOE, SHARDED),
    ("ipc", TENSOR, MOE, SHARDED),
    ("ipc", MX, DENSE, REPLICAS),
    ("reshard", MX, MOE, SHARDED),
    ("reshard", BLOCK, DENSE, REPLICAS),
    ("broadcast", MX, MOE, SHARDED),
    ("broadcast", TENSOR, DENSE, SHARDED),
]


def reduce_max(vector: torch.Tensor) -> None:
    torch.distributed.all_reduce(vector, torch.distributed.ReduceOp.MAX)


def shard(spec: TrainerSpec, form: Format, tp: int, version: int) -> LocalShard:
    full = spec.full(version)
    return LocalShard(
        [load_quantized(quantized(spec.cfg, form, rank, tp), form, full) for rank in range(tp)]
    )


def bits(model: StandinModel) -> dict[str, torch.Tensor]:
    return {n: t.contiguous().view(torch.uint8).clone() for n, t in model.tensors().items()}


def different(model: StandinModel, want: StandinModel) -> list[str]:
    have = bits(model)
    return [n for n, t in bits(want).items() if not torch.equal(t, have[n])]


@pytest.mark.parametrize(("transport", "form", "model", "layout"), CASES)
def test_workers_equal_ones_that_loaded_the_quantized_checkpoint(
    transport: str, form: Format, model: str, layout: tuple[str, int]
) -> None:
    """The third version holds the weights of the second: processing them again changes nothing."""
    options = {"reduce_max": reduce_max} if layout == SHARDED else {}
    spec = TrainerSpec(config(model), *layout, endpoint=options)
    with Trainers(spec) as trainers:
        one = shard(spec, form, 2, 0)
        synchronizer = WeightSynchronizer(
            trainers.infos, [one], transport=transport, deadline_s=20, bucket_bytes=1 << 15
        )
        if options and form is TENSOR:
            synchronizer.init_communicator()  # Before publish(): ranks make these scales in there.
        for version, weights in ((1, 1), (2, 0), (3, 0)):
            trainers.publish(version, weights)
            assert synchronizer.sync_weights(version).verified
            want = shard(spec, form, 2, weights).models
            assert [different(m, w) for m, w in zip(one.models, want, strict=True)] == [[], []]
        synchronizer.shutdown()


# --- one trainer in this process ----------------------------------------------------------------


class OneTrainer:
    """A module with random weights, served from this process."""

    def __init__(self, cfg: Config, dtype: torch.dtype = torch.bfloat16) -> None:
        self.weights = {n: t.to(dtype) for n, t in random_weights(cfg, 1).items()}
        self.module = Holder({n: t.clone() for n, t in self.weights.items()})
        self.trainers = LocalTrainers([ModuleSource(self.module)])
        self.infos = self.trainers.infos

    def parameter(self, name: str) -> torch.Tensor:
        return self.module.get_parameter(name).data

    def __enter__(self) -> OneTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.trainers.close()


NAME = "model.layers.1.mlp.down_proj.weight"


def engine(form: Format, tp: int = 1) -> LocalShard:
    return shard(TrainerSpec(config("tiny-fp8")), form, tp, 0)


def test_bytes_on_the_wire_are_those_of_values_and_scales() -> None:
    cfg = config("tiny-fp8")
    with OneTrainer(cfg) as trainer:
        synchronizer = WeightSynchronizer(trainer.infos, [engine(Format.MXFP8)], deadline_s=20)
        trainer.trainers.publish(1)
        report = synchronizer.sync_weights(1)
    matrices = sum(t.numel() for n, t in trainer.weights.items() if is_quantized(n))
    others = sum(t.numel() for n, t in trainer.weights.items() if not is_quantized(n))
    assert report.bytes == matrices + matrices // 32 + 2 * others
    assert (matrices + matrices // 32) / (2 * matrices) == 0.515625


def test_infinite_weight_is_refused_before_an_engine_is_paused() -> None:
    one = engine(Format.MXFP8)
    before = bits(one.models[0])
    with OneTrainer(config("tiny-fp8")) as trainer:
        synchronizer = WeightSynchronizer(trainer.infos, [one], deadline_s=20)
        trainer.parameter(NAME)[3, 5] = float("inf")
        trainer.trainers.publish(1)
        with pytest.raises(QuantizationError, match=r"model\.layers\.1\.mlp\.down_proj\.weight"):
            synchronizer.sync_weights(1)
        assert one.log == []
        trainer.parameter(NAME)[3, 5] = 1.0
        trainer.trainers.publish(2)
        assert synchronizer.sync_weights(2).verified
    assert before.keys() == bits(one.models[0]).keys()


def test_engine_keeps_its_bytes_when_an_infinity_is_refused() -> None:
    one = engine(Format.FP8_BLOCK)
    before = bits(one.models[0])
    with OneTrainer(config("tiny-fp8")) as trainer:
        synchronizer = WeightSynchronizer(trainer.infos, [one], deadline_s=20)
        trainer.parameter(NAME).fill_(float("-inf"))
        trainer.trainers.publish(1)
        with pytest.raises(QuantizationError):
            synchronizer.sync_weights(1)
    after = bits(one.models[0])
    assert all(torch.equal(after[n], t) for n, t in before.items())


def test_quantized_tensors_nobody_asked_for_are_refused() -> None:
    cfg = config("tiny-fp8")
    one = LocalShard([fused(cfg).load(random_weights(cfg, 0))])
    before = bits(one.models[0])
    with OneTrainer(cfg, dtype=torch.float8_e4m3fn) as trainer:
        synchronizer = WeightSynchronizer(trainer.infos, [one], deadline_s=20)
        with pytest.raises(QuantizationError, match="was not asked for"):
            synchronizer.init_communicator()
    after = bits(one.models[0])
    assert all(torch.equal(after[n], t) for n, t in before.items())


def test_shards_that_want_different_formats_are_refused() -> None:
    with OneTrainer(config("tiny-fp8")) as trainer:
        synchronizer = WeightSynchronizer(
            trainer.infos, [engine(Format.MXFP8), engine(Format.FP8_BLOCK)], deadline_s=20
        )
        with pytest.raises(QuantizationError, match="Start all shards with the same"):
            synchronizer.init_communicator()


def test_unquantized_engine_after_a_quantized_one_gets_the_trainers_own_tensors() -> None:
    cfg = config("tiny-fp8")
    plain = LocalShard([fused(cfg).load(random_weights(cfg, 0))])
    with OneTrainer(cfg) as trainer:
        shards = [engine(Format.MXFP8), plain]
        synchronizer = WeightSynchronizer(trainer.infos, shards, deadline_s=20)
        synchronizer.init_communicator(absent=[1])
        trainer.trainers.publish(1)
        synchronizer.sync_weights(1)
        assert synchronizer.wanted
        synchronizer.init_communicator(absent=[0])
        trainer.trainers.publish(2)
        synchronizer.sync_weights(2)
        assert synchronizer.wanted == ()
    assert different(plain.models[0], fused(cfg).load(trainer.weights)) == []


def test_refit_after_memory_was_given_back_brings_the_new_weights() -> None:
    one = engine(Format.MXFP8)
    with OneTrainer(config("tiny-fp8")) as trainer:
        (endpoint,) = trainer.trainers.endpoints
        synchronizer = WeightSynchronizer(trainer.infos, [one], deadline_s=20)
        trainer.trainers.publish(1)
        synchronizer.sync_weights(1)
        endpoint.forget()
        trainer.parameter(NAME).mul_(2)
        trainer.trainers.publish(2)
        assert synchronizer.sync_weights(2).verified
        want = trainer.weights | {NAME: trainer.weights[NAME] * 2}
    model = load_quantized(quantized(config("tiny-fp8"), Format.MXFP8), Format.MXFP8, want)
    assert different(one.models[0], model) == []


def test_fp32_masters_are_quantized_with_one_rounding() -> None:
    one = engine(Format.FP8_BLOCK)
    cfg = config("tiny-fp8")
    source = random_weights(cfg, 7, dtype=torch.float32)
    with LocalTrainers([ModuleSource(Holder(source), cast={"*": "bfloat16"})]) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [one], deadline_s=20)
        trainers.publish(1)
        assert synchronizer.sync_weights(1).verified
    want = {n: t if is_quantized(n) else t.bfloat16() for n, t in source.items()}
    rounded = {n: t.bfloat16() for n, t in source.items()}

    def loaded(weights: dict[str, torch.Tensor]) -> StandinModel:
        return load_quantized(quantized(cfg, Format.FP8_BLOCK), Format.FP8_BLOCK, weights)

    assert different(one.models[0], loaded(want)) == []
    assert different(one.models[0], loaded(rounded)) != []


# --- shards that cannot be quantized ------------------------------------------------------------


def test_shards_that_cut_a_block_are_refused_with_names() -> None:
    cfg = {**config("tiny-fp8"), "intermediate_size": 96}
    spec = TrainerSpec(cfg, "tp", 2)
    one = shard(spec, Format.MXFP8, 1, 0)
    with Trainers(spec) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [one], deadline_s=20)
        with pytest.raises(QuantizationError, match="move the cut at K=48 to 32 or 64"):
            synchronizer.init_communicator()


def test_sharded_matrices_with_one_scale_need_reduce_max() -> None:
    spec = TrainerSpec(config("tiny-fp8"), "fsdp", 2)
    one = shard(spec, Format.FP8_TENSOR, 1, 0)
    with Trainers(spec) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [one], deadline_s=20)
        with pytest.raises(QuantizationError, match="reduce_max"):
            synchronizer.init_communicator()


# --- scales that ranks make together ------------------------------------------------------------


class Together:
    """One rank with a ``reduce_max`` that notes which thread calls it."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        weights = random_weights(config("tiny-fp8"), 1)
        module = Holder({n: t.to(torch.bfloat16) for n, t in weights.items()})
        self.endpoint = TrainerEndpoint(ModuleSource(module), 0, reduce_max=self._reduce)
        self.synchronizer = WeightSynchronizer(
            [self.endpoint.info], [engine(Format.FP8_TENSOR)], deadline_s=20
        )

    def _reduce(self, vector: torch.Tensor) -> None:
        self.threads.append(threading.get_ident())


@pytest.fixture
def together() -> Iterator[Together]:
    one = Together()
    yield one
    one.synchronizer.shutdown()
    one.endpoint.close()


def test_reduce_max_is_called_once_per_publish_by_the_thread_that_publishes(
    together: Together,
) -> None:
    together.synchronizer.init_communicator()
    for version in (1, 2):
        together.endpoint.publish(version)
        assert together.synchronizer.sync_weights(version).verified
    assert together.threads == [threading.get_ident()] * 2


def test_a_version_published_before_engines_want_shared_scales_is_refused_without_reduce_max(
    together: Together,
) -> None:
    together.endpoint.publish(1)
    with pytest.raises(QuantizationError, match=r"version 1 .* publish\(\) it again"):
        together.synchronizer.sync_weights(1)
    assert together.threads == []


def test_after_that_refusal_the_same_version_can_be_published_again(together: Together) -> None:
    together.endpoint.publish(1)
    with pytest.raises(QuantizationError):
        together.synchronizer.sync_weights(1)
    together.endpoint.publish(1)
    assert together.synchronizer.sync_weights(1).verified


def test_a_version_whose_quantized_memory_was_given_back_is_refused_without_reduce_max(
    together: Together,
) -> None:
    together.synchronizer.init_communicator()
    together.endpoint.publish(1)
    together.endpoint.forget()
    with pytest.raises(QuantizationError, match=r"publish\(\) it again"):
        together.synchronizer.sync_weights(1)
    assert len(together.threads) == 1
