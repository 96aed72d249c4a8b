"""The plan benchmark against brute force on a tiny model, and its command line."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from plan_cases import delivered, members, values

from bench import plan as bench_plan
from bench.parallelism import Parallelism, parse
from bench.plan_model import ModelTensor, describe
from bench.plan_sides import manifests, recordings
from weight_sync.dtypes import itemsize
from weight_sync.errors import ConfigError
from weight_sync.manifest import TensorSpec
from weight_sync.plan import build_plan

MODEL = "tiny-deepseek"
PAIRS = [
    (Parallelism(), Parallelism()),
    (Parallelism(dp=2, tp=2, pp=2, ep=4), Parallelism(dp=2, tp=2, ep=4)),
    (Parallelism(dp=2, tp=2, pp=3, ep=2), Parallelism(dp=2, tp=2, pp=2)),
    (Parallelism(fsdp=3, tp=2), Parallelism(tp=4)),
    (Parallelism(dp=4, ep=4), Parallelism(dp=3, ep=3)),
]


def wanted_bytes(tensor: ModelTensor, engine: Parallelism, ep: int, tp: int) -> int:
    """What one worker of a single pipeline stage needs of a tensor, from first principles."""
    whole = math.prod(tensor.shape) * itemsize(tensor.dtype)
    if tensor.expert is not None and engine.ep > 1:
        owners = [rank for rank in range(engine.ep) for _ in range(8 // engine.ep)]
        left = 8 % engine.ep
        if left:
            owners = sorted([*owners, *range(left)])
        return whole if owners[tensor.expert] == ep else 0
    if tensor.cut is None:
        return whole
    if tensor.vocabulary:
        rows = range(128 // engine.tp * tp, 128 // engine.tp * (tp + 1))
        return whole // 100 * len([r for r in rows if r < 100])
    return whole // engine.tp


@pytest.mark.parametrize(("trainer", "engine"), PAIRS, ids=str)
def test_every_worker_gets_every_element_of_its_slices_once(
    trainer: Parallelism, engine: Parallelism
) -> None:
    model = describe(MODEL)
    held, wanted = manifests(model, trainer), recordings(model, engine)
    assert (len(held), len(wanted)) == (trainer.ranks, engine.ranks)
    plan = build_plan(members(trainer.ranks, engine.ranks), held, wanted)
    data = values([TensorSpec(t.name, t.dtype, t.shape) for t in model.tensors])
    for worker in range(engine.ranks):
        got, times = delivered(plan, worker, held, data)
        assert all((t == 1).all() for t in times)
        assert all((p >= 0).all() for p in got)


@pytest.mark.parametrize(("trainer", "engine"), PAIRS, ids=str)
def test_the_figures_are_those_of_brute_force(trainer: Parallelism, engine: Parallelism) -> None:
    model = describe(MODEL)
    held, wanted = manifests(model, trainer), recordings(model, engine)
    plan = build_plan(members(trainer.ranks, engine.ranks), held, wanted)
    dtypes = {t.name: t.dtype for t in model.tensors}
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    pairs = set()
    for worker in range(engine.ranks):
        program = plan.receiver_program(worker)
        target = plan.recordings[program.class_id]
        columns = (program.slice, program.sender, program.size)
        for number, sender, size in zip(*(c.unpack() for c in columns), strict=True):
            name = target.sources[int(target.source.unpack()[number])].name
            nbytes = math.prod(size.tolist()) * itemsize(dtypes[name])
            sent[int(sender)] += nbytes
            received[worker] += nbytes
            pairs.add((int(sender), worker))
    found = bench_plan.run_plan(MODEL, trainer, engine, link_gbps=2.0)
    assert found["bytes_sent"] == found["bytes_needed"] == sum(sent.values())
    assert found["messages"] == len(pairs)
    mean = sum(sent.values()) / len(sent)
    assert found["sender_imbalance"] == pytest.approx(max(sent.values()) / mean)
    busiest = max(*sent.values(), *received.values())
    assert found["floor_seconds"] == pytest.approx(busiest / 2e9)
    assert found["broadcast_floor_seconds"] == pytest.approx(model.nbytes / 2e9)


@pytest.mark.parametrize(
    "engine",
    [Parallelism(tp=2), Parallelism(dp=2, tp=2, ep=4), Parallelism(dp=3, ep=3), Parallelism(tp=4)],
    ids=str,
)
def test_workers_need_what_their_layers_hold(engine: Parallelism) -> None:
    model = describe(MODEL)
    plan = build_plan(
        members(1, engine.ranks), manifests(model, Parallelism()), recordings(model, engine)
    )
    for worker, c in enumerate(plan.worker_class):
        ep, tp = worker % engine.ep, worker % engine.tp
        expected = sum(wanted_bytes(t, engine, ep, tp) for t in model.tensors)
        assert int(plan.pieces[c].nbytes.sum()) == expected


def test_narrow_kv_heads_are_replicated_by_wide_tensor_parallelism() -> None:
    key = next(t for t in describe("tiny").tensors if t.name.endswith("k_proj.weight"))
    assert key.shape == (64, 128)
    assert [key.box(4, rank, 64).offset[0] for rank in range(4)] == [0, 0, 32, 32]


def test_deepseek_v3_has_its_published_size() -> None:
    model = describe("deepseek-v3")
    parameters = sum(math.prod(t.shape) for t in model.tensors)
    assert round(parameters / 1e9) == 671
    assert (model.layers, model.experts) == (61, 256)


def test_bigger_streams_count_as_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    model = describe(MODEL)
    held, wanted = manifests(model, Parallelism()), recordings(model, Parallelism())
    plan = build_plan(members(1, 1), held, wanted, bucket_bytes=4096)
    padded = -(-np.array([t.nbytes for t in model.tensors]) // 256) * 256
    count, used = 0, 4097
    for size in padded.tolist():
        count += used + size > 4096
        used = size if used + size > 4096 else used + size
    assert bench_plan._messages(plan) == count > 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Parallelism()),
        ("tp=4", Parallelism(tp=4)),
        ("dp=2, tp=4,pp=1,ep=8", Parallelism(dp=2, tp=4, ep=8)),
    ],
)
def test_parallelism_is_read(text: str, expected: Parallelism) -> None:
    assert parse(text) == expected
    assert parse(str(expected)) == expected


@pytest.mark.parametrize("text", ["tp", "tp=0", "tp=-1", "tp=x", "cp=2", "tp=2,tp=4", "fsdp=2"])
def test_parallelism_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not understood"):
        parse(text)


def test_experts_that_do_not_divide_over_a_stage_are_refused() -> None:
    with pytest.raises(ConfigError, match="ep=3 must divide the 4 ranks"):
        parse("dp=2,tp=2,pp=3,ep=3")


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"known: .*deepseek-v3"):
        describe("gpt-9")


def test_the_command_line_writes_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out" / "plan.json"
    command = f"plan --model {MODEL} --trainer fsdp=2 --engine tp=2 --json {target}"
    monkeypatch.setattr(sys, "argv", command.split())
    bench_plan.main()
    assert json.loads(target.read_text()) == json.loads(capsys.readouterr().out)
    assert set(json.loads(target.read_text())) == {
        "model",
        "trainer",
        "engine",
        "plan_seconds",
        "plan_bytes_per_rank_max",
        "bytes_sent",
        "bytes_needed",
        "messages",
        "sender_imbalance",
        "floor_seconds",
        "broadcast_floor_seconds",
    }
