"""Quantized vLLM engines on a GPU: after refits they are what their own checkpoint made of them.

Every case starts one engine from version 0 on disk, refits other versions and then version 0 again.
Engines of checkpoints get values and scales that the trainer quantized; "online" ones get bf16 and
quantize by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from bench.models import Config, config, random_weights, shapes
from bench.quantized_models import FORMATS, is_quantized, write_quantized
from tests.harness.gpu_engines import (
    GRAPHS,
    Bits,
    addresses,
    bits,
    changed,
    checkpoint,
    collect,
    greedy,
    model_of,
    start,
)
from tests.harness.gpu_trainers import GpuTrainers
from weight_sync.engine import LocalLLM
from weight_sync.report import RefitReport
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

DENSE, MOE = "tiny-fp8", "tiny-fp8-moe"


@dataclass(frozen=True)
class Case:
    """One engine.

    Attributes:
        form: A key of ``FORMATS``, or what the engine quantizes to online.
        online: Whether it quantizes by itself.
        model: Name of the configuration.
        graphs: Whether decode steps run as CUDA graphs.
    """

    form: str
    online: bool = False
    model: str = DENSE
    graphs: bool = True

    def __str__(self) -> str:
        words = [self.form, "online" if self.online else "", self.model[len(DENSE) + 1 :]]
        return "-".join([*filter(None, words), "graphs" if self.graphs else "eager"])


# vLLM builds its groups for experts with the first engine of a process, if that has any.
CASES = [
    Case("mxfp8", model=MOE),
    Case("fp8", model=MOE),
    Case("mxfp8"),
    Case("mxfp8", graphs=False),
    Case("fp8"),
    Case("fp8", graphs=False),
    Case("fp8-tensor"),
    Case("mxfp8", online=True),
    Case("fp8", online=True),
]


@dataclass(frozen=True)
class Running:
    """An engine, and what it was right after it loaded version 0 from disk."""

    case: Case
    cfg: Config
    llm: Any
    disk: Bits
    tokens: list[list[int]]


def options(case: Case) -> dict[str, Any]:
    given: dict[str, Any] = {"quantization": case.form} if case.online else {}
    return given | ({"compilation_config": GRAPHS} if case.graphs else {})


@pytest.fixture(scope="module", params=CASES, ids=str)
def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    case: Case = request.param
    cfg = config(case.model)
    folder: Path = tmp_path_factory.mktemp("v0")
    if case.online:
        checkpoint(cfg, 0, folder)
    else:
        write_quantized(cfg, random_weights(cfg, 1000), FORMATS[case.form], folder)
    llm = start(folder, **options(case))
    yield Running(case, cfg, llm, bits(model_of(llm)), greedy(llm))
    del llm
    collect()


@dataclass(frozen=True)
class Seen:
    """What an engine was after one refit."""

    report: RefitReport
    bits: Bits
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def refits(running: Running, trainer: GpuTrainers) -> list[Seen]:
    """Refits of versions 1, 2 and then 0, 0, 0."""
    seen = []
    before = addresses(model_of(running.llm))
    with trainer.weights(running.cfg, "plain") as weights:
        sync = WeightSynchronizer(weights.infos, [LocalLLM(running.llm)], deadline_s=60)
        for version, values in enumerate((1, 2, 0, 0, 0), start=1):
            weights.publish(version, values)
            report = sync.sync_weights(version)
            model = model_of(running.llm)
            seen.append(Seen(report, bits(model), greedy(running.llm)))
            moved = changed(before, addresses(model))
            assert moved == [], f"tensors moved in refit {version}: {moved}"
        wanted = {spec.name for spec in sync.wanted}
        sync.shutdown()
    quantized = {n for n, _ in shapes(running.cfg) if is_quantized(n)}
    assert wanted == (set() if running.case.online else quantized)
    return seen


def test_engine_equals_the_one_that_loaded_its_checkpoint(
    running: Running, refits: list[Seen]
) -> None:
    assert changed(running.disk, refits[2].bits) == []
    assert refits[2].tokens == running.tokens


def test_other_versions_change_every_trained_tensor(running: Running, refits: list[Seen]) -> None:
    """Guards the test above: an engine that never changed would pass it."""
    trained = {n for n in running.disk if "weight" in n.split(".")[-1] or n.endswith(".bias")}
    # Scales may be equal by chance where a version has few of them.
    values = {n for n in trained if "_scale" not in n}
    assert values <= set(changed(refits[0].bits, refits[1].bits))
    assert refits[0].tokens != refits[1].tokens


def test_three_refits_in_a_row_are_identical(refits: list[Seen]) -> None:
    third, fourth, fifth = refits[2:]
    assert third.bits == fourth.bits == fifth.bits
    assert third.tokens == fourth.tokens == fifth.tokens


def test_every_refit_is_verified_and_no_module_needs_its_loader(refits: list[Seen]) -> None:
    assert all(seen.report.verified for seen in refits)
    assert {mode for seen in refits for mode in seen.report.modes} <= {"direct", "processed"}
    print(f"modes: {refits[0].report.modes}, {refits[0].report.bytes} bytes")


def test_block_scaled_linears_are_written_in_place(running: Running, refits: list[Seen]) -> None:
    """128x128 blocks have one layout on disk and in the kernel, so nothing is processed."""
    if (running.case.form, running.case.online, running.case.model) != ("fp8", False, DENSE):
        pytest.skip("only of dense FP8-block checkpoints, which are another case here")
    assert set(refits[0].report.modes) == {"direct"}


def test_bytes_on_the_wire_are_those_of_the_format(running: Running, refits: list[Seen]) -> None:
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes(running.cfg)}
    quantized = sum(n for name, n in sizes.items() if is_quantized(name))
    others = sum(sizes.values()) - quantized
    if running.case.online:
        want = 2 * (quantized + others)
    else:
        scales = {
            "mxfp8": quantized // 32,
            "fp8": 4 * quantized // 128**2,
            "fp8-tensor": 4 * sum(is_quantized(n) for n in sizes),
        }
        want = quantized + scales[running.case.form] + 2 * others
    assert refits[0].report.bytes == want
