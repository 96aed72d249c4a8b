"""Refits around vLLM's sleep: nothing is lost, nothing is served early, memory is bounded."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

import psutil

from bench.models import Config, config, shapes
from tests.harness.gpu_engines import (
    Bits,
    addresses,
    bits,
    changed,
    checkpoint,
    collect,
    digest,
    greedy,
    model_of,
    plain_tensors,
    start,
    worker_of,
)
from tests.harness.gpu_trainers import GpuTrainers, OpenWeights
from weight_sync.engine import LocalLLM
from weight_sync.errors import EngineStateError
from weight_sync.synchronizer import WeightSynchronizer

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# 266 MB in bf16; the largest tensor is smaller than a bucket.
CONFIG: Config = {
    **config("tiny-moe"),
    "vocab_size": 32000,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_experts": 32,
}
BUCKET = 32 << 20
_globals: dict[str, torch.Tensor] = {}


@dataclass
class Running:
    """An engine that can sleep and what it was right after it loaded version 0 from disk."""

    llm: object
    disk: Bits
    plain: Bits
    tokens: list[list[int]]
    sync: WeightSynchronizer
    weights: OpenWeights
    version: int = 0

    def refit(self, weights: int) -> None:
        """One refit with the weights of a version."""
        self.version += 1
        self.weights.publish(self.version, weights)
        assert self.sync.sync_weights(self.version).verified

    def state(self) -> tuple[list[str], list[str]]:
        """What differs from the engine that loaded version 0 from disk."""
        model = model_of(self.llm)
        plain = plain_bits(model)
        return changed(self.disk, bits(model)), changed(self.plain, plain)


@pytest.fixture(scope="module")
def running(trainer: GpuTrainers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = checkpoint(CONFIG, 0, tmp_path_factory.mktemp("sleep"))
    llm = start(folder, enable_sleep_mode=True)
    tokens = greedy(llm)
    model = model_of(llm)
    _add_unprotected(model)
    plain = plain_bits(model)
    # Offloaded, so that refits need staging memory while the engine's memory comes and goes.
    with trainer.weights(CONFIG, "host") as weights:
        sync = WeightSynchronizer(
            weights.infos, [LocalLLM(llm)], deadline_s=60, bucket_bytes=BUCKET
        )
        engine = Running(llm, bits(model), plain, tokens, sync, weights)
        del llm, model
        engine.refit(1)
        yield engine
        sync.shutdown()
    engine.llm = None
    _globals.clear()
    collect()


def plain_bits(model: torch.nn.Module) -> Bits:
    """Digests of tensors in plain attributes, but for the KV cache itself."""
    return {n: digest(t) for n, t in plain_tensors(model) if not n.endswith(".kv_cache")}


def _add_unprotected(model: torch.nn.Module) -> None:
    """Case B28: tensors of four kinds in the memory that sleep drops."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    # torch frees a pool whose last reference goes, even while its tensors live.
    _globals["pool"] = allocator.allocator_and_pools["weights"]  # type: ignore[assignment]
    with allocator.use_memory_pool(tag="weights"):
        made = [torch.full((257,), 1.5 + n, device="cuda") for n in range(4)]
    model.register_buffer("test_persistent", made[0])
    model.register_buffer("test_transient", made[1], persistent=False)
    model.test_plain = made[2]
    _globals["test"] = made[3]


def asleep_then(running: Running, level: int, weights: int) -> None:
    """Sleeps, wakes the weights, refits, wakes the rest."""
    running.llm.sleep(level=level)
    running.llm.wake_up(tags=["weights"])
    running.refit(weights)
    running.llm.wake_up(tags=["kv_cache"])


def test_every_kind_of_tensor_survives_level_2_and_a_refit_brings_the_weights(
    running: Running,
) -> None:
    """B28: three cycles, each as an engine that loaded the weights from disk."""
    before = addresses(model_of(running.llm))
    for _ in range(3):
        asleep_then(running, 2, 0)
        assert running.state() == ([], [])
        assert _globals["test"].eq(4.5).all()
        assert greedy(running.llm) == running.tokens
    assert changed(before, addresses(model_of(running.llm))) == []


def test_level_1_keeps_what_the_last_refit_brought(running: Running) -> None:
    """B29: sync, generate, sleep, wake, generate."""
    running.refit(1)
    want, tokens = bits(model_of(running.llm)), greedy(running.llm)
    assert tokens != running.tokens
    running.llm.sleep(level=1)
    running.llm.wake_up()
    assert changed(want, bits(model_of(running.llm))) == []
    assert greedy(running.llm) == tokens
    asleep_then(running, 1, 0)
    assert running.state() == ([], [])
    assert greedy(running.llm) == running.tokens


@pytest.mark.parametrize("level", [1, 2])
def test_sleeping_weights_are_neither_refitted_nor_asked(running: Running, level: int) -> None:
    """B29: refused with a clear error, not a crash and not old weights."""
    shard = LocalLLM(running.llm)
    running.llm.sleep(level=level)
    with pytest.raises(EngineStateError, match="asleep"):
        running.refit(2)
    assert not running.sync.is_stale
    with pytest.raises(EngineStateError, match="asleep"):
        shard.generate([{"prompt_token_ids": [1]}], use_tqdm=False)
    running.llm.wake_up(tags=["weights"])
    with pytest.raises(EngineStateError, match="kv_cache asleep"):
        shard.generate([{"prompt_token_ids": [1]}], use_tqdm=False)
    running.llm.wake_up(tags=["kv_cache"])
    if level == 2:
        with pytest.raises(EngineStateError, match="discarded"):
            shard.generate([{"prompt_token_ids": [1]}], use_tqdm=False)
    running.refit(0)
    assert running.state() == ([], [])
    assert greedy(running.llm) == running.tokens


def test_the_kv_cache_may_wake_before_the_weights(running: Running) -> None:
    running.llm.sleep(level=2)
    running.llm.wake_up(tags=["kv_cache"])
    running.llm.wake_up(tags=["weights"])
    running.refit(0)
    assert running.state() == ([], [])
    assert greedy(running.llm) == running.tokens


def test_calibrated_scales_survive_a_wake_that_resets_them(running: Running) -> None:
    """B17. vLLM resets scales by the cache dtype alone, so it is set while the cache wakes."""
    layers = [m for m in model_of(running.llm).modules() if hasattr(m, "_k_scale")]
    assert layers
    scales = [(m._k_scale, m._v_scale) for m in layers]
    for k, v in scales:
        k.fill_(0.02)
        v.fill_(0.05)
    runner = worker_of(running.llm).model_runner
    dtype = runner.cache_config.cache_dtype
    reset: list[float] = []
    usual = runner.post_kv_cache_wake_up

    def watched() -> None:
        usual()
        reset.append(float(scales[0][0]))

    runner.post_kv_cache_wake_up = watched
    try:
        for new in (None, 0.03):
            running.llm.sleep(level=2)
            running.llm.wake_up(tags=["weights"])
            running.refit(0)
            if new is not None:
                for k, _ in scales:
                    k.fill_(new)
            runner.cache_config.cache_dtype = "fp8"
            running.llm.wake_up(tags=["kv_cache"])
            runner.cache_config.cache_dtype = dtype
            want = torch.tensor([new or 0.02, 0.05])
            assert all(torch.equal(torch.stack(pair).cpu(), want) for pair in scales)
    finally:
        runner.cache_config.cache_dtype = dtype
        del runner.post_kv_cache_wake_up
        for pair in scales:
            for scale in pair:
                scale.fill_(1.0)
    assert reset == [1.0, 1.0], "this vLLM does not reset scales, so nothing was tested"


class _Peak:
    """The least free memory of the GPU during a block, watched from a thread."""

    def __enter__(self) -> _Peak:
        torch.cuda.synchronize()
        self.start = self.least = torch.cuda.mem_get_info()[0]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.0005):
            self.least = min(self.least, torch.cuda.mem_get_info()[0])

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def used(self) -> int:
        """Bytes above the start."""
        return self.start - self.least


def test_ten_cycles_stay_within_their_memory(running: Running, trainer: GpuTrainers) -> None:
    """B60: sender and receiver together, and every cycle ends where it began."""
    sizes = [n.numel() * 2 for n in (torch.empty(s, device="meta") for _, s in shapes(CONFIG))]
    layer = sum(sizes[1:-2]) // int(CONFIG["num_hidden_layers"])  # type: ignore[call-overload]
    # The trainer gave its slots back, so that the first cycle allocates them.
    running.weights.ask("forget")
    resting, resident = [], []
    for cycle in range(10):
        running.llm.sleep(level=2)
        running.llm.wake_up(tags=["weights"])
        with _Peak() as peak:
            running.refit(cycle % 2)
        bound = 2 * BUCKET + max(sizes) + BUCKET + layer
        assert peak.used <= bound, f"cycle {cycle}: {peak.used >> 20} of {bound >> 20} MiB"
        running.llm.wake_up(tags=["kv_cache"])
        gc.collect()
        torch.cuda.empty_cache()
        (theirs,) = trainer.ask("memory")
        resting.append((torch.cuda.mem_get_info()[0], theirs[1]))
        resident.append(psutil.Process(os.getpid()).memory_info().rss)
    for kept in zip(*resting[1:], strict=True):
        assert max(kept) - min(kept) <= BUCKET
    assert max(resident[1:]) - resident[1] <= BUCKET
