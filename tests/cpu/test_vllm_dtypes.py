"""Case B13: a router bias keeps its fp32 bits under a bf16 policy, or the refit is refused."""

from __future__ import annotations

import pytest
import torch

from tests.harness.layer_case import LayerCase
from tests.harness.trainers import Holder
from weight_sync.errors import CoverageError, LayoutError, WeightSyncError
from weight_sync.sources.module import ModuleSource

pytestmark = pytest.mark.timeout(60)

BIAS, GATE = "layer.gate.e_score_correction_bias", "layer.gate.weight"
ROUTER = {GATE: (8, 4), BIAS: (8,)}
VALUES = torch.tensor([34.00, 34.05, 34.10, 34.15, 34.20, 34.11, 34.02, 34.07])
SCORES = torch.tensor([0.50, 0.48, 0.40, 0.30, 0.20, 0.45, 0.52, 0.46])


class RouterCase(LayerCase):
    """The trainer holds the gate in bf16 and the bias of the case in fp32."""

    def checkpoint(self, seed: int) -> dict[str, torch.Tensor]:
        full = super().checkpoint(seed)
        return {GATE: full[GATE].to(torch.bfloat16), BIAS: VALUES + seed}

    @staticmethod
    def start() -> dict[str, torch.Tensor]:
        return {GATE: torch.ones(8, 4, dtype=torch.bfloat16), BIAS: VALUES.clone()}


def chosen(bias: torch.Tensor) -> set[int]:
    return set((SCORES + bias).topk(2).indices.tolist())


def test_b13_fp32_router_bias_arrives_bit_equal_and_chooses_the_same_experts() -> None:
    with RouterCase("router", ROUTER) as case:
        case.sync(1)
        case.sync(0)
        have = torch.tensor(case.ask("value", BIAS))
        assert case.ask("dtype", BIAS) == "torch.float32"
        assert torch.equal(have, VALUES)
        assert chosen(have) == {5, 6}


def test_b13_the_values_tell_a_bf16_detour_apart() -> None:
    """Guards the test above."""
    assert chosen(VALUES.to(torch.bfloat16).float()) == {3, 6}


def test_b13_an_engine_that_stores_the_bias_in_bf16_is_refused() -> None:
    with RouterCase("router-bf16", ROUTER) as case:
        before = case.ask("dump")
        with pytest.raises(CoverageError) as refused:
            case.sync(1)
        assert [line.split()[0] for line in refused.value.disagreeing] == [BIAS]
        assert "float32" in refused.value.disagreeing[0]
        assert "bfloat16" in refused.value.disagreeing[0]
        assert case.ask("dump") == before


def test_b13_a_bias_that_nobody_sends_is_refused() -> None:
    class WithoutBias(RouterCase):
        def checkpoint(self, seed: int) -> dict[str, torch.Tensor]:
            return {GATE: super().checkpoint(seed)[GATE]}

    with WithoutBias("router", ROUTER) as case, pytest.raises(CoverageError) as refused:
        case.sync(1)
    assert [name.split()[0] for name in refused.value.unwritten] == [BIAS]


def test_b13_a_dtype_that_changed_after_the_manifest_is_refused_before_anything_changes() -> None:
    module = Holder(RouterCase.start())
    with RouterCase("router", ROUTER, source=ModuleSource(module)) as case:
        case.trainers.publish(1)
        case.synchronizer.sync_weights(1)
        before = case.ask("dump")
        gate = module.layer.gate
        shorter = gate.e_score_correction_bias.detach().to(torch.bfloat16)
        gate.e_score_correction_bias = torch.nn.Parameter(shorter)
        with pytest.raises(LayoutError, match=r"bfloat16.*float32"):
            case.trainers.publish(2)
        with pytest.raises(WeightSyncError, match="publish"):
            case.synchronizer.sync_weights(2, deadline_s=0.5)
        assert case.ask("dump") == before
