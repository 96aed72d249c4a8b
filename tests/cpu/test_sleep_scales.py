"""Case B17: calibrated KV-cache scales survive a wake that resets them, and new ones count."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weight_sync.vllm.sleep import SleepGuard


class Attention(torch.nn.Module):
    """Scales as vLLM's attention layers hold them, on the host and on the device."""

    def __init__(self, k: float, v: float) -> None:
        super().__init__()
        self.register_buffer("_k_scale", torch.tensor(k))
        self.register_buffer("_v_scale", torch.tensor(v))
        self._k_scale_float, self._v_scale_float = k, v

    def calibrate(self, k: float) -> None:
        """What a refit that brings a k scale does."""
        self._k_scale.fill_(k)
        self._k_scale_float = k

    def scales(self) -> list[float]:
        return [round(float(s), 6) for s in (self._k_scale, self._v_scale)]


class Worker:
    """A worker whose KV wake sets every scale to 1, as vLLM 0.26's does."""

    def __init__(self, attention: Attention) -> None:
        self.model_runner = SimpleNamespace(model=torch.nn.Sequential(attention))
        self._sleep_saved_buffers: dict[str, torch.Tensor] = {}
        self.slept: list[int] = []

    def sleep(self, level: int = 1) -> None:
        self.slept.append(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            for module in self.model_runner.model:
                module._k_scale.fill_(1.0)
                module._v_scale.fill_(1.0)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("wakes", [(None,), (["weights"], ["kv_cache"])], ids=["whole", "parts"])
def test_calibrated_scales_survive_sleep(level: int, wakes: tuple[list[str] | None, ...]) -> None:
    attention = Attention(0.02, 0.05)
    worker = Worker(attention)
    SleepGuard(worker)
    worker.sleep(level=level)
    for tags in wakes:
        worker.wake_up(tags=tags)
    assert worker.slept == [level]
    assert attention.scales() == [0.02, 0.05]
    assert (attention._k_scale_float, attention._v_scale_float) == (0.02, 0.05)


def test_scales_that_a_refit_brought_before_the_kv_cache_woke_stay() -> None:
    attention = Attention(0.02, 0.05)
    worker = Worker(attention)
    SleepGuard(worker)
    worker.sleep(level=2)
    worker.wake_up(tags=["weights"])
    attention.calibrate(0.03)
    worker.wake_up(tags=["kv_cache"])
    assert attention.scales() == [0.03, 0.05]
    assert attention._k_scale_float == 0.03


def test_an_uncalibrated_engine_stays_at_one() -> None:
    attention = Attention(1.0, 1.0)
    worker = Worker(attention)
    SleepGuard(worker)
    worker.sleep(level=2)
    worker.wake_up()
    assert attention.scales() == [1.0, 1.0]


def test_a_kv_wake_before_the_weights_leaves_saved_buffers_for_later() -> None:
    worker = Worker(Attention(1.0, 1.0))
    guard = SleepGuard(worker)
    worker.sleep(level=2)
    saved = {"rotary": torch.ones(1)}
    worker._sleep_saved_buffers = saved
    worker.wake_up(tags=["kv_cache"])
    assert worker._sleep_saved_buffers is saved
    assert guard.asleep == {"weights"}
