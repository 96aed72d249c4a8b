"""Case B59: planning a large MoE takes seconds once, grows linearly, and is not repeated."""

from __future__ import annotations

import time

import pytest
import torch

from tests.harness.contract import connecting, plain_model
from tests.harness.standin import StandinModel, Tensors, Unit
from weight_sync.layout import full_box
from weight_sync.manifest import Manifest, TensorSpec, build_manifest
from weight_sync.membership import Membership
from weight_sync.plan import Plan, build_plan
from weight_sync.recording import Recording
from weight_sync.worker.recorded import make_recording

pytestmark = pytest.mark.timeout(120)

EXPERTS, RANKS, HIDDEN, INNER = 128, 8, 2048, 768


def offers(layers: int) -> list[TensorSpec]:
    shapes = {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}
    return [
        TensorSpec(f"l{i}.experts.{e}.{part}", "bfloat16", shape)
        for i in range(layers)
        for e in range(EXPERTS)
        for part, shape in shapes.items()
    ]


def expert_parallel_worker(layers: int, rank: int) -> StandinModel:
    """Holds its 1/8 of the experts of every layer; nothing has memory."""
    mine = EXPERTS // RANKS
    shapes = {
        "w13": ((mine, 2 * INNER, HIDDEN), torch.bfloat16),
        "w2": ((mine, HIDDEN, INNER), torch.bfloat16),
    }
    loaders = {}
    for i in range(layers):
        for e in range(mine):
            name = f"l{i}.experts.{rank * mine + e}."
            for part in ("gate", "up", "down"):
                loaders[name + part] = [(f"l{i}.experts", _into(e, part))]
    return StandinModel([Unit(f"l{i}.experts", shapes) for i in range(layers)], loaders)


def _into(number: int, part: str):
    def load(tensors: Tensors, loaded: torch.Tensor) -> None:
        if part == "down":
            tensors["w2"][number].copy_(loaded)
        else:
            first = INNER * (part == "up")
            tensors["w13"][number, first : first + INNER].copy_(loaded)

    return load


def manifest(layers: int) -> Manifest:
    return build_manifest(0, "h", "cpu", [(s, [full_box(s.shape)]) for s in offers(layers)])


def plan_of(layers: int, recordings: list[Recording]) -> tuple[Plan, float]:
    """The plan and the processor seconds it took; other load on the machine does not count."""
    one = manifest(layers)
    start = time.process_time()
    plan = build_plan(Membership(1, 1, (0,), RANKS), [one], recordings)
    return plan, time.process_time() - start


@pytest.fixture(scope="module")
def recordings() -> dict[int, list[Recording]]:
    return {
        layers: [
            make_recording(expert_parallel_worker(layers, r), offers(layers), ()).recording
            for r in range(RANKS)
        ]
        for layers in (3, 48)
    }


def test_b59_planning_18432_names_takes_under_two_seconds(
    recordings: dict[int, list[Recording]],
) -> None:
    assert len(offers(48)) == 18_432
    _, seconds = plan_of(48, recordings[48])
    assert seconds < 2.0


def test_b59_planning_grows_linearly(recordings: dict[int, list[Recording]]) -> None:
    assert len(offers(3)) == 1_152
    small = min(plan_of(3, recordings[3])[1] for _ in range(3))
    large = plan_of(48, recordings[48])[1]
    # Sixteen times the names; quadratic growth would be 256 times.
    assert large < 16 * 3 * small


def test_b59_each_expert_parallel_rank_receives_an_eighth(
    recordings: dict[int, list[Recording]],
) -> None:
    plan, _ = plan_of(3, recordings[3])
    total = sum(2 * HIDDEN * INNER for _ in offers(3))
    received = [int(plan.pieces[c].nbytes.sum()) for c in plan.worker_class]
    assert received == [total // RANKS] * RANKS


def test_b59_the_second_refit_does_not_plan_again() -> None:
    with connecting("ipc") as connect:
        setup = connect([{"t": torch.ones(4)}], [plain_model({"t": torch.zeros(4)})])
        setup.trainers.publish(1)
        first = setup.synchronizer.sync_weights(1)
        plan = setup.synchronizer.plan
        setup.trainers.publish(2)
        second = setup.synchronizer.sync_weights(2)
        assert setup.synchronizer.plan is plan
        assert "plan" in first.seconds
        assert "plan" not in second.seconds
        assert {"transfer", "verify", "invalidate"} <= second.seconds.keys()
