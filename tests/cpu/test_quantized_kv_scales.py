"""B17: scales of a quantized KV cache ride the plan; those that do not come stay."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.models import config, random_weights
from bench.quantized_models import write_quantized
from tests.harness.cpu_quantized import QuantizedRank
from tests.harness.engines import Engine
from tests.harness.local import LocalTrainers
from tests.harness.trainers import Holder
from weight_sync.errors import QuantizationError
from weight_sync.quantize.format import Format
from weight_sync.sources.module import ModuleSource
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = pytest.mark.timeout(120)

CONFIG = config("tiny-fp8")
VERSIONS = count(1)
Scales = list[tuple[float, ...]]


def _attention(rank: Any) -> list[Any]:
    return [layer.self_attn.attn for layer in rank.model.model.layers]


def calibrate(rank: Any, k: float, v: float) -> None:
    """What loading a checkpoint with calibrated scales into an FP8 cache leaves behind."""
    for layer in _attention(rank):
        layer.kv_cache_dtype = "fp8"
        for name, value in (("k", k), ("v", v)):
            getattr(layer, f"_{name}_scale").fill_(value)
            setattr(layer, f"_{name}_scale_float", value)
            getattr(layer, f"_{name}_scale_cpu").fill_(value)


def scales(rank: Any) -> Scales:
    """k and v of every layer: on device, as host numbers, and in host tensors."""
    return [
        tuple(
            round(float(getattr(layer, f"_{name}_scale{where}")), 6)
            for name in "kv"
            for where in ("", "_float", "_cpu")
        )
        for layer in _attention(rank)
    ]


def stored(rank: Any) -> list[list[int]]:
    return [[layer._k_scale.data_ptr(), layer._v_scale.data_ptr()] for layer in _attention(rank)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = tmp_path_factory.mktemp("kv")
    write_quantized(CONFIG, random_weights(CONFIG, 0), Format.MXFP8, folder)
    with Engine(folder, 1, QuantizedRank) as engine:
        yield engine.ready()


def refit(engine: Engine, extra: dict[str, float]) -> None:
    weights = random_weights(CONFIG, 1)
    weights |= {name: torch.tensor(value) for name, value in extra.items()}
    with LocalTrainers([ModuleSource(Holder(weights))]) as trainers:
        synchronizer = WeightSynchronizer(trainers.infos, [engine], deadline_s=30)
        version = next(VERSIONS)
        trainers.publish(version)
        try:
            assert synchronizer.sync_weights(version).verified
        finally:
            synchronizer.shutdown()


def test_scales_that_do_not_come_stay(engine: Engine) -> None:
    engine.ask("call", calibrate, 0.02, 0.05)
    refit(engine, {})
    assert engine.ask("call", scales) == [[(0.02, 0.02, 0.02, 0.05, 0.05, 0.05)] * 2]


def test_scales_that_come_are_taken_over_on_device_and_host(engine: Engine) -> None:
    engine.ask("call", calibrate, 0.02, 0.05)
    before = engine.ask("call", stored)
    refit(engine, {f"model.layers.{i}.self_attn.k_scale": 0.03 for i in range(2)})
    assert engine.ask("call", scales) == [[(0.03, 0.03, 0.03, 0.05, 0.05, 0.05)] * 2]
    assert engine.ask("call", stored) == before


def test_uncalibrated_engine_stays_uncalibrated(engine: Engine) -> None:
    engine.ask("call", calibrate, 1.0, 1.0)
    refit(engine, {})
    assert engine.ask("call", scales) == [[(1.0,) * 6] * 2]


def test_scale_an_engine_would_divide_by_zero_with_is_refused(engine: Engine) -> None:
    engine.ask("call", calibrate, 0.02, 0.05)
    with pytest.raises(QuantizationError, match="positive finite"):
        refit(engine, {f"model.layers.{i}.self_attn.v_scale": 0.0 for i in range(2)})
    assert engine.ask("call", scales) == [[(0.02, 0.02, 0.02, 0.05, 0.05, 0.05)] * 2]
