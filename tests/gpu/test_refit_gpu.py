"""Refits on a real GPU into real vLLM, compared bit by bit with engines loaded from disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from bench.models import config, random_weights, write_checkpoint
from bench.refit import ENGINE_ENVIRONMENT
from bench.trainer_process import BenchTrainer, TrainerProcesses

PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7], list(range(20, 60)), [1]]
os.environ.update({k: ENGINE_ENVIRONMENT[k] for k in ("VLLM_ENABLE_V1_MULTIPROCESSING",)})


def start(folder: Path, *, eager: bool) -> object:
    from vllm import LLM

    from weight_sync.vllm.worker_extension import EXTENSION

    return LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=eager,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        gpu_memory_utilization=0.1,
        worker_extension_cls=EXTENSION,
    )


def model_of(llm: object) -> torch.nn.Module:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def live(llm: object) -> dict[str, torch.Tensor]:
    return {n: t.detach().cpu().clone() for n, t in model_of(llm).state_dict().items()}


def addresses(llm: object) -> dict[str, int]:
    return {n: p.data_ptr() for n, p in model_of(llm).named_parameters()}


def greedy(llm: object) -> list[list[int]]:
    from vllm import SamplingParams

    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in PROMPTS],
        SamplingParams(temperature=0, max_tokens=16, detokenize=False, ignore_eos=True),
        use_tqdm=False,
    )
    return [list(o.outputs[0].token_ids) for o in outputs]


@pytest.fixture(params=["tiny", "tiny-tied", "tiny-moe"])
def trainer(request: pytest.FixtureRequest) -> Iterator[tuple[dict, TrainerProcesses]]:
    cfg = config(request.param)
    with TrainerProcesses(BenchTrainer(cfg, ("cuda:0",), "cuda")) as processes:
        yield cfg, processes


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graphs"])
def test_engine_after_refits_equals_a_fresh_engine_bit_for_bit(
    trainer: tuple[dict, TrainerProcesses], eager: bool, tmp_path: Path
) -> None:
    from weight_sync.engine import LocalLLM
    from weight_sync.synchronizer import WeightSynchronizer

    cfg, processes = trainer
    llm = start(write_checkpoint(cfg, random_weights(cfg, 0), tmp_path / "v0"), eager=eager)
    before = addresses(llm)
    sync = WeightSynchronizer(processes.infos, [LocalLLM(llm)], deadline_s=60)
    results = {}
    for version in (1, 2, 3):
        processes.ask("publish", version)
        report = sync.sync_weights(version)
        assert report.verified
        assert not sync.is_stale
        results[version] = (live(llm), greedy(llm))
        (weights,) = processes.ask("snapshot")
        write_checkpoint(cfg, weights, tmp_path / f"v{version}")
    assert addresses(llm) == before
    assert report.modes.get("loader", 0) == 0
    sync.shutdown()
    del llm
    torch.cuda.empty_cache()
    for version in (2, 3):
        fresh = start(tmp_path / f"v{version}", eager=eager)
        want = live(fresh)
        have, tokens = results[version]
        assert have.keys() == want.keys()
        for name, tensor in want.items():
            if (tensor.numel() and "weight" in name) or "bias" in name:
                assert torch.equal(
                    have[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8)
                ), f"{name} differs at version {version}"
        assert greedy(fresh) == tokens
        del fresh
        torch.cuda.empty_cache()


def test_weights_written_on_a_side_stream_just_before_publish_arrive(tmp_path: Path) -> None:
    """B43: the copy waits for the producer's stream, and returns before v2 may be written."""
    from weight_sync.engine import LocalLLM
    from weight_sync.synchronizer import WeightSynchronizer

    cfg = config("tiny")
    with TrainerProcesses(BenchTrainer(cfg, ("cuda:0",), "cuda")) as processes:
        llm = start(write_checkpoint(cfg, random_weights(cfg, 0), tmp_path / "v0"), eager=True)
        sync = WeightSynchronizer(processes.infos, [LocalLLM(llm)], deadline_s=60)
        name = "model.norm.weight"
        for version in range(1, 21):
            processes.ask("publish_late", version)
            sync.sync_weights(version)
            processes.ask("overwrite", -1.0)
            got = dict(model_of(llm).named_parameters())[name]
            assert got.detach().float().unique().tolist() == [float(version)]
        sync.shutdown()


def test_fifty_refits_leave_memory_and_handles_as_they_were(tmp_path: Path) -> None:
    """B32: nothing grows on either side between refit 2 and refit 50."""
    from weight_sync.engine import LocalLLM
    from weight_sync.synchronizer import WeightSynchronizer

    cfg = config("tiny")
    with TrainerProcesses(BenchTrainer(cfg, ("cuda:0",), "cuda")) as processes:
        llm = start(write_checkpoint(cfg, random_weights(cfg, 0), tmp_path / "v0"), eager=True)
        sync = WeightSynchronizer(processes.infos, [LocalLLM(llm)], deadline_s=60)
        seen = []
        for version in range(1, 51):
            processes.ask("publish", version)
            sync.sync_weights(version)
            torch.cuda.synchronize()
            (theirs,) = processes.ask("memory")
            ours = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
            seen.append((ours, theirs, len(os.listdir("/proc/self/fd"))))
        sync.shutdown()
    assert seen[-1] == seen[4]
