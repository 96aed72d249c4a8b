"""Plans: every element once and from an owner, one digest for everything, and speed."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import Slice, cut, delivered, manifest, members, recording, values, whole

from weight_sync import pieces as pieces_module
from weight_sync.buckets import cut as cut_buckets
from weight_sync.errors import CoverageError, LayoutError
from weight_sync.layout import (
    Box,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    chunk_range,
    full_box,
    shard_box,
)
from weight_sync.manifest import Manifest, TensorSpec
from weight_sync.plan import Plan, build_plan, matches
from weight_sync.recording import Recording

W = TensorSpec("w", "bfloat16", (8, 4))
V = TensorSpec("v", "float32", (6,))


@st.composite
def trainers(draw: st.DrawFn, specs: list[TensorSpec]) -> list[Manifest]:
    """A mesh of any shape, with any placement of each tensor, FSDP2 over TP included."""
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    held: list[list[tuple[TensorSpec, list[Box]]]] = [[] for _ in range(int(np.prod(mesh)))]
    for spec in specs:
        placements: list[Placement] = []
        for _ in mesh:
            dim = draw(st.sampled_from([None, *range(len(spec.shape))]))
            placements.append(Replicate() if dim is None else Shard(dim))
        if len(mesh) > 1 and spec.shape and draw(st.booleans()):
            placements[-2:] = [StridedShard(0, split_factor=mesh[-1]), Shard(0)]
        for rank, coordinate in enumerate(np.ndindex(*mesh)):
            box = shard_box(spec.shape, mesh, placements, coordinate)
            held[rank].append((spec, [box]))
    return [manifest(rank, tensors) for rank, tensors in enumerate(held)]


@st.composite
def engines(draw: st.DrawFn, specs: list[TensorSpec]) -> list[Recording]:
    """Workers of shards that cut tensors along any dimension, or read arbitrary boxes of them."""
    width = draw(st.integers(1, 3))
    dims = [draw(st.sampled_from([None, *range(len(s.shape))])) for s in specs]
    classes = []
    for worker in range(width):
        slices = []
        for spec, dim in zip(specs, dims, strict=True):
            offset, size = [0] * len(spec.shape), list(spec.shape)
            if dim is not None:
                offset[dim], size[dim] = chunk_range(spec.shape[dim], width, worker)
            if all(size) or 0 in spec.shape:
                slices.append(Slice(spec, Box(tuple(offset), tuple(size))))
        spec = draw(st.sampled_from([s for s in specs if s.shape and 0 not in s.shape]))
        offset = [draw(st.integers(0, n - 1)) for n in spec.shape]
        size = [draw(st.integers(1, n - o)) for n, o in zip(spec.shape, offset, strict=True)]
        slices.insert(draw(st.integers(0, len(slices))), Slice(spec, Box((*offset,), (*size,))))
        classes.append(recording(slices))
    return classes * draw(st.integers(1, 2))


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[TensorSpec], list[Manifest], list[Recording]]:
    shapes = draw(
        st.lists(
            st.lists(st.integers(1, 7), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
        )
    )
    specs = [TensorSpec(f"t{i}", "bfloat16", shape) for i, shape in enumerate(shapes)]
    specs += [TensorSpec("scalar", "float32", ()), TensorSpec("empty", "float32", (0, 3))]
    return specs, draw(trainers(specs)), draw(engines(specs))


@settings(max_examples=250, deadline=None)
@given(job=jobs(), split=st.sampled_from([8, 32 << 20]))
def test_every_element_comes_exactly_once_and_from_an_owner(
    job: tuple[list[TensorSpec], list[Manifest], list[Recording]], split: int
) -> None:
    specs, manifests, recordings = job
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "SPLIT_BYTES", split)
        plan = build_plan(members(len(manifests), len(recordings)), manifests, recordings)
    data = values(specs)
    for worker, wanted in enumerate(recordings):
        got, times = delivered(plan, worker, manifests, data)
        source, offset, size = (a.unpack() for a in (wanted.source, wanted.offset, wanted.size))
        for number, parameter in enumerate(got):
            name = wanted.sources[int(source[number])].name
            rank = parameter.ndim
            pad = offset.shape[1] - rank
            box = Box(tuple(offset[number, pad:]), tuple(size[number, pad:]))
            np.testing.assert_array_equal(parameter, cut(data[name], box))
            assert (times[number] == 1).all()


@settings(max_examples=100, deadline=None)
@given(job=jobs())
def test_senders_hash_every_class_exactly_once(
    job: tuple[list[TensorSpec], list[Manifest], list[Recording]],
) -> None:
    specs, manifests, recordings = job
    plan = build_plan(members(len(manifests), len(recordings)), manifests, recordings)
    data = values(specs)
    for number, wanted in enumerate(plan.recordings):
        totals = np.zeros(len(wanted.slot_source.unpack()), np.int64)
        for rank in range(len(manifests)):
            regions = manifests[rank].regions()
            for task in plan.sender_program(rank).hashes:
                if task.class_id != number:
                    continue
                assert task.slots == len(totals)
                columns = (task.slot, task.region, task.offset, task.size)
                for slot, region, offset, size in zip(*(c.unpack() for c in columns), strict=True):
                    spec, owned = regions[int(region)]
                    pad = len(offset) - len(spec.shape)
                    piece = Box(tuple(map(int, offset[pad:])), tuple(map(int, size[pad:])))
                    assert owned.intersect(piece) == piece
                    totals[slot] += cut(data[spec.name], piece).sum()
        worker = plan.worker_class.index(number)
        got, _ = delivered(plan, worker, manifests, data)
        assert totals.tolist() == [int(p.sum()) for p in got]


@settings(max_examples=100, deadline=None)
@given(job=jobs())
def test_senders_send_what_receivers_expect_in_the_same_order(
    job: tuple[list[TensorSpec], list[Manifest], list[Recording]],
) -> None:
    _, manifests, recordings = job
    plan = build_plan(members(len(manifests), len(recordings)), manifests, recordings)
    for rank in range(len(manifests)):
        tasks = {task.worker: task for task in plan.sender_program(rank).sends}
        for worker in range(len(recordings)):
            program = plan.receiver_program(worker)
            mine = program.sender.unpack() == rank
            assert mine.any() == (worker in tasks)
            for field in ("region", "offset", "size", "unit") if mine.any() else ():
                sent = getattr(tasks[worker], field).unpack()
                np.testing.assert_array_equal(sent, getattr(program, field).unpack()[mine])


def two_by_two(**change: object) -> Plan:
    """Two trainer ranks with halves of ``w`` and replicas of ``v``; two equal workers."""
    spec = change.get("spec", W)
    assert isinstance(spec, TensorSpec)
    cut_at = change.get("cut_at", 4)
    assert isinstance(cut_at, int)
    manifests = [
        manifest(0, [(spec, [Box((0, 0), (cut_at, 4))]), *whole(V)]),
        manifest(1, [(spec, [Box((cut_at, 0), (8 - cut_at, 4))]), *whole(V)]),
    ]
    first = recording([Slice(spec, full_box((8, 4))), Slice(V, full_box((6,)))])
    second = change.get("second", first)
    assert isinstance(second, Recording)
    return build_plan(
        members(2, 2, epoch=change.get("epoch", 1)),  # type: ignore[arg-type]
        manifests,
        [first, second],
        cost=change.get("cost"),  # type: ignore[arg-type]
        bucket_bytes=change.get("bucket_bytes", 1024),  # type: ignore[arg-type]
    )


def test_equal_inputs_give_equal_digests() -> None:
    assert two_by_two().digest == two_by_two().digest


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": 2},
        {"bucket_bytes": 2048},
        {"cut_at": 5},
        {"spec": TensorSpec("w", "bfloat16", (8, 4), unit="u")},
        {"spec": TensorSpec("w", "float32", (8, 4))},
        {"cost": np.array([[0, 0], [1, 1]], np.int8)},
        {"second": recording([Slice(W, Box((0, 0), (4, 4))), Slice(V, full_box((6,)))])},
    ],
    ids=lambda change: next(iter(change)),
)
def test_any_difference_changes_the_digest(change: dict[str, object]) -> None:
    assert two_by_two(**change).digest != two_by_two().digest


def test_equal_workers_are_planned_once() -> None:
    plan = two_by_two()
    assert (len(plan.recordings), plan.worker_class) == (1, (0, 0))


def test_replicas_are_shared_between_senders() -> None:
    sent = two_by_two().sender_bytes()
    assert sent.sum() == two_by_two().bytes_sent == 2 * (64 + 24)
    assert sent.tolist() == [88, 88]


def test_programs_carry_the_epoch_and_the_digest() -> None:
    plan = two_by_two(epoch=7)
    for program in (plan.receiver_program(1), plan.sender_program(0)):
        assert (program.epoch, program.plan_digest) == (7, plan.digest)


def test_values_and_their_scales_travel_in_one_bucket() -> None:
    specs = []
    for i in range(20):
        specs.append(TensorSpec(f"{i}.weight", "uint8", (600,), unit=f"u{i}"))
        specs.append(TensorSpec(f"{i}.weight_scale", "uint8", (20,), unit=f"u{i}"))
    slices = [Slice(s, full_box(s.shape)) for s in (*specs[::2], *specs[1::2])]
    plan = build_plan(
        members(1, 1), [manifest(0, whole(*specs))], [recording(slices)], bucket_bytes=1600
    )
    program = plan.receiver_program(0)
    unit = program.unit.unpack()
    nbytes = program.size.unpack().prod(axis=1)
    buckets = cut_buckets(nbytes, unit.astype(np.int32), program.bucket_bytes)
    assert buckets.count > 1
    for u in np.unique(unit):
        assert len(set(buckets.bucket[unit == u].tolist())) == 1


def test_units_stay_together_when_senders_own_halves() -> None:
    value = TensorSpec("w", "uint8", (8, 32), unit="w")
    scale = TensorSpec("w_scale", "uint8", (8, 1), unit="w")
    other = TensorSpec("other", "uint8", (8, 32))
    manifests = [
        manifest(r, [(s, [Box((4 * r, 0), (4, s.shape[1]))]) for s in (value, scale, other)])
        for r in range(2)
    ]
    wanted = recording([Slice(s, full_box(s.shape)) for s in (value, other, scale)])
    program = build_plan(members(2, 1), manifests, [wanted]).receiver_program(0)
    for sender in range(2):
        units = program.unit.unpack()[program.sender.unpack() == sender].tolist()
        assert units == [0, 0, -1]


def refused(
    manifests: list[Manifest], recordings: list[Recording], not_trained: tuple[str, ...] = ()
) -> CoverageError:
    with pytest.raises(CoverageError) as refusal:
        build_plan(
            members(len(manifests), len(recordings)), manifests, recordings, not_trained=not_trained
        )
    return refusal.value


def test_names_that_no_loader_read_are_listed() -> None:
    extra = [TensorSpec(f"x{i}", "float32", (1,)) for i in range(3)]
    error = refused([manifest(0, whole(V, *extra))], [recording([Slice(V, full_box((6,)))])])
    assert error.unconsumed == ("x0", "x1", "x2")


@pytest.mark.parametrize("pattern", ["visual.proj", "visual.*", "*"])
def test_names_declared_not_trained_may_stay_unread(pattern: str) -> None:
    extra = TensorSpec("visual.proj", "float32", (1,))
    plan = build_plan(
        members(1, 1),
        [manifest(0, whole(V, extra))],
        [recording([Slice(V, full_box((6,)))])],
        not_trained=[pattern],
    )
    assert plan.tensors == 1


def test_names_that_no_trainer_offers_any_more_are_refused() -> None:
    wanted = recording([Slice(V, full_box((6,))), Slice(W, full_box((8, 4)))])
    with pytest.raises(LayoutError, match=r"1 tensors that no trainer rank offers: w\. Record"):
        build_plan(members(1, 1), [manifest(0, whole(V))], [wanted])


def test_a_tie_is_read_when_any_of_its_names_is() -> None:
    head = TensorSpec("head", "float32", (6,), alias_of="v")
    for read in (V, head):
        wanted = recording([Slice(read, full_box((6,)))])
        assert build_plan(members(1, 1), [manifest(0, whole(V, head))], [wanted]).tensors == 1


def test_a_dtype_that_the_engine_would_round_is_refused() -> None:
    bias = TensorSpec("router.bias", "float32", (8,))
    error = refused(
        [manifest(0, whole(bias))], [recording([Slice(bias, full_box((8,)), "bfloat16")])]
    )
    (message,) = error.disagreeing
    assert "router.bias is sent as float32" in message
    assert "as bfloat16" in message


@pytest.mark.parametrize(("trainers_", "workers"), [(2, 1), (1, 2)])
def test_a_number_of_participants_that_does_not_fit_is_refused(
    trainers_: int, workers: int
) -> None:
    with pytest.raises(LayoutError, match="1 manifests and 1 recordings came"):
        build_plan(
            members(trainers_, workers),
            [manifest(0, whole(V))],
            [recording([Slice(V, full_box((6,)))])],
        )


def test_patterns_match_names_or_prefixes() -> None:
    assert matches("visual.proj", ["visual.*"])
    assert not matches("visual", ["visual.*"])
    assert not matches("a.visual.b", ["visual.*"])


def expert_job(layers: int) -> Callable[[], Plan]:
    """Names of ``layers`` layers of 128 experts on 8 expert-parallel ranks, read by 8 workers."""
    specs = [
        TensorSpec(f"layers.{i}.experts.{e}.{p}_proj.weight", "bfloat16", (768, 2048))
        for i in range(layers)
        for e in range(128)
        for p in ("gate", "up", "down")
    ]
    by_rank = [[s for s in specs if int(s.name.split(".")[3]) // 16 == r] for r in range(8)]
    manifests = [manifest(rank, whole(*mine)) for rank, mine in enumerate(by_rank)]
    recordings = [recording([Slice(s, full_box(s.shape)) for s in mine]) for mine in by_rank]
    membership = members(8, 8)
    return lambda: build_plan(membership, manifests, recordings)


def fastest(job: Callable[[], object]) -> float:
    # Processor time, so that other programs on the machine do not count.
    times = []
    for _ in range(3):
        start = time.process_time()
        job()
        times.append(time.process_time() - start)
    return min(times)


def test_planning_time_grows_linearly_to_18432_names_and_stays_below_two_seconds() -> None:
    few, many = fastest(expert_job(3)), fastest(expert_job(48))
    assert many < 2.0
    # 16 times the names; a quadratic step would show as 256 times the time.
    assert many < 48 * few


def test_an_expert_parallel_worker_receives_its_part_of_the_experts() -> None:
    plan = expert_job(3)()
    received = [int(plan.pieces[c].nbytes.sum()) for c in plan.worker_class]
    assert received == [3 * 16 * 3 * 768 * 2048 * 2] * 8
