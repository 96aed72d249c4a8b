"""Processed units keep what was compiled for them, but only for the memory that it was made for."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

from tests.harness.standin import StandinModel, Unit, takes
from weight_sync.layout import full_box
from weight_sync.manifest import TensorSpec, build_manifest
from weight_sync.membership import Membership
from weight_sync.plan import build_plan
from weight_sync.transports.base import Delivery
from weight_sync.worker import install as module
from weight_sync.worker.install import Installer, Stopwatch, storage_bytes
from weight_sync.worker.recorded import make_recording

SPECS = [TensorSpec("q", "float32", (2, 6)), TensorSpec("k", "float32", (1, 6))]


class Placed(StandinModel):
    """Gives the copies of its one unit the memory that a test chooses."""

    def __init__(self) -> None:
        super().__init__(
            [Unit("qk", {"weight": ((3, 6), torch.float32)}, post_load=_twice)],
            {
                "q": [("qk", takes("weight", 0, 0, 1, 0, 2))],
                "k": [("qk", takes("weight", 0, 0, 1, 2, 1))],
            },
        )
        self.memory = torch.empty(3, 6)

    def begin(self, unit: str):  # type: ignore[no-untyped-def]
        made = super().begin(unit)
        made.tensors["weight"] = self.memory.fill_(float("nan"))
        return made


def _twice(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: 2 * tensor for name, tensor in tensors.items()}


class Engine:
    """One worker with everything to install versions."""

    def __init__(self) -> None:
        self.model = Placed()
        self.values = {"q": torch.zeros(2, 6), "k": torch.zeros(1, 6)}
        self.model.load(self.values)
        recorded = make_recording(self.model, SPECS, ())
        manifest = build_manifest(0, "h", "cpu", [(s, [full_box(s.shape)]) for s in SPECS])
        plan = build_plan(Membership(1, 1, (0,), 1), [manifest], [recorded.recording])
        self.program = plan.receiver_program(0)
        self.installer = Installer(self.model, recorded, self.program)

    def _delivery(self) -> Iterator[Delivery]:
        region = self.program.region.unpack().astype(np.int64)
        rows = np.arange(len(region), dtype=np.int64)
        yield Delivery(
            rows=rows,
            buffers=[storage_bytes(t) for t in self.values.values()],
            buffer=region.astype(np.int32),
            offset=np.zeros(len(rows), np.int64),
            stride=np.tile(np.array([6, 1], np.int64), (len(rows), 1)),
            dtypes=("float32",) * len(rows),
            key="same memory",
        )

    def install(self, value: float) -> int:
        """Installs a version; how many copies were compiled for it."""
        self.values["q"].fill_(value)
        self.values["k"].fill_(-value)
        with mock.patch.object(module, "compile_copy", wraps=module.compile_copy) as compiled:
            self.installer.install(self._delivery(), lambda: None, Stopwatch(), 1, 1)
        live = self.model.tensors()["qk.weight"]
        want = 2 * torch.cat([self.values["q"], self.values["k"]])
        assert torch.equal(live, want)
        return compiled.call_count


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_copies_that_lie_where_they_lay_are_not_compiled_again(engine: Engine) -> None:
    assert [engine.install(v) for v in (1.0, 2.0, 3.0)] == [1, 0, 0]


def test_copies_in_other_memory_are_compiled_for_it(engine: Engine) -> None:
    engine.install(1.0)
    first, engine.model.memory = engine.model.memory, torch.empty(3, 6)
    assert engine.install(2.0) == 1
    assert first.eq(torch.tensor([[1.0], [1.0], [-1.0]])).all()


def test_what_was_compiled_keeps_no_copy_alive(engine: Engine) -> None:
    import weakref

    engine.install(1.0)
    storage = weakref.ref(engine.model.memory)
    engine.model.memory = torch.empty(3, 6)
    engine.model._loading.clear()
    assert storage() is None
