"""Trainer and engine grids of the refit benchmark: places, devices, and what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench import grid_cases, options
from bench.engine_process import visible
from bench.grids import (
    EngineGrid,
    TrainerGrid,
    check_devices,
    engine_devices,
    engine_grid,
    trainer_devices,
    trainer_grid,
)
from bench.models import config
from weight_sync.errors import ConfigError

DENSE, EXPERTS = config("tiny"), config("tiny-moe")


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_arguments(parser)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("text", "grid", "ranks"),
    [
        ("dp=1", TrainerGrid(), 1),
        ("dp=2", TrainerGrid(fsdp=2), 2),
        ("pp=2", TrainerGrid(pp=2), 2),
        ("tp=2", TrainerGrid(tp=2), 2),
        ("ep=4", TrainerGrid(ep=4), 4),
        ("pp=2,ep=2", TrainerGrid(pp=2, ep=2), 4),
        ("pp=2,tp=2", TrainerGrid(pp=2, tp=2), 4),
        ("tp=2,ep=4", TrainerGrid(tp=2, ep=4), 4),
        ("tp=2,ep=2", TrainerGrid(tp=2, ep=2), 2),
    ],
)
def test_trainer_grids_are_read_with_their_number_of_ranks(
    text: str, grid: TrainerGrid, ranks: int
) -> None:
    found = trainer_grid(text, EXPERTS)
    assert found == grid
    assert found.ranks == ranks
    assert trainer_grid(str(found), EXPERTS) == grid


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("dp=2,pp=2", "goes with no other kind"),
        ("pp=3", "num_hidden_layers=2 does not divide over pp=3"),
        ("tp=4", "num_key_value_heads=2 does not divide over tp=4"),
        ("ep=3", "num_experts=8 does not divide over ep=3"),
        ("tp=2,ep=1,cp=2", "is not understood"),
        ("pp=0", "is not understood"),
    ],
)
def test_trainer_grids_that_cannot_be_are_refused(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        trainer_grid(text, EXPERTS)


def test_expert_parallel_ranks_that_are_no_multiple_of_tensor_parallel_ones_are_refused() -> None:
    wide = {**EXPERTS, "num_key_value_heads": 4, "num_attention_heads": 4}
    with pytest.raises(ConfigError, match="must be a multiple of its tp=4"):
        trainer_grid("tp=4,ep=2", wide)


@pytest.mark.parametrize("read", [trainer_grid, engine_grid])
def test_dense_models_have_no_expert_parallel_ranks(read: object) -> None:
    with pytest.raises(ConfigError, match="has no experts"):
        read("ep=2", DENSE)  # type: ignore[operator]


def test_ranks_of_a_stage_are_neighbours_as_megatron_numbers_them() -> None:
    grid = TrainerGrid(pp=2, ep=2)
    assert [list(ranks) for ranks in grid.stages()] == [[0, 1], [2, 3]]
    assert [grid.place(rank).pp.rank for rank in range(4)] == [0, 0, 1, 1]
    assert [grid.place(rank).ep.rank for rank in range(4)] == [0, 1, 0, 1]


def test_experts_are_cut_as_dense_layers_unless_they_are_spread() -> None:
    assert TrainerGrid(tp=2).place(1).etp.size == 2
    assert TrainerGrid(tp=2, ep=2).place(1).etp.size == 1


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("tp=2", EngineGrid(2)),
        ("tp=1,dp=2", EngineGrid(1, 2)),
        ("ep=2", EngineGrid(2, 1, True)),
        ("tp=2,dp=2,ep=2", EngineGrid(2, 2, True)),
    ],
)
def test_engine_grids_are_read(text: str, grid: EngineGrid) -> None:
    assert engine_grid(text, EXPERTS) == grid
    assert engine_grid(str(grid), EXPERTS) == grid


def test_whole_experts_need_as_many_workers_as_the_shard_has() -> None:
    with pytest.raises(ConfigError, match="ep=4 must equal tp=2"):
        engine_grid("tp=2,ep=4", EXPERTS)


def test_trainers_have_the_gpus_after_those_of_the_engine() -> None:
    trainer, engine = TrainerGrid(pp=2), EngineGrid(2, 2)
    assert engine_devices(engine, "cuda") == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert trainer_devices(None, trainer, engine, "cuda", shared=False) == ("cuda:4", "cuda:5")
    assert trainer_devices(None, trainer, engine, "cuda", shared=True) == ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("given", "why"),
    [("cuda:1", "2 ranks but --trainer-devices names 1"), ("cuda:1,cpu", "'cpu' is no device")],
)
def test_trainer_devices_that_do_not_fit_are_refused(given: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        trainer_devices(given, TrainerGrid(pp=2), EngineGrid(), "cuda", shared=False)


def test_too_few_gpus_are_an_error_that_says_how_many_it_takes() -> None:
    check_devices(("cuda:0", "cuda:3"), 4)
    with pytest.raises(ConfigError, match="needs 5 GPUs, the machine has 4"):
        check_devices(("cuda:0", "cuda:4"), 4)


def test_an_engine_sees_its_own_gpus_first_and_then_the_others() -> None:
    assert visible(("cuda:2", "cuda:3"), "0123") == "2,3,0,1"
    assert visible(("cuda:1",), ["GPU-a", "GPU-b"]) == "GPU-b,GPU-a"


def test_nccl_on_a_shared_gpu_is_refused_before_anything_starts() -> None:
    words = ("--device", "cuda", "--transport", "ipc,reshard", "--trainer-devices", "cuda:0")
    with pytest.raises(SystemExit, match="NCCL takes a GPU once"):
        options.parse(arguments(*words))


@pytest.mark.parametrize("text", ["", "ipc,carrier"])
def test_unknown_transports_are_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="write some of ipc, broadcast, reshard"):
        options.parse(arguments("--transport", text))


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--against", "magic"), "--against knows"),
        (("--against", "vllm-native", "--trainer", "dp=2"), "needs --device cuda"),
        (("--against", "checkpoint-engine", "--engine", "tp=2"), "needs one trainer rank"),
    ],
)
def test_rivals_that_cannot_take_part_are_refused(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        options.parse(arguments(*words))


@pytest.mark.parametrize("case", grid_cases.CASES, ids=lambda case: case.name)
def test_every_case_is_a_refit_that_its_command_line_accepts(
    case: grid_cases.Case, tmp_path: Path
) -> None:
    args = argparse.Namespace(device="cpu", transport="ipc,reshard", repeat=1, against="")
    words = grid_cases.command(case, args, tmp_path / "out.json")
    found = options.parse(arguments(*words[4:]))
    assert found.trainer.ranks + found.engine.workers == case.gpus
    assert len(found.trainer_devices) == found.trainer.ranks


def test_cases_that_need_more_gpus_than_there_are_are_left_out() -> None:
    four = argparse.Namespace(only="", gpus=4, device="cuda")
    assert max(case.gpus for case in grid_cases.chosen(four)) == 4
    one = argparse.Namespace(only="", gpus=1, device="cuda")
    with pytest.raises(SystemExit, match="none of the cases fits 1"):
        grid_cases.chosen(one)
