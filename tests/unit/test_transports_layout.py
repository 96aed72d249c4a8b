"""How broadcast and reshard cut a plan: every needed byte once, in buckets and rounds that fit."""

from __future__ import annotations

import numpy as np
import pytest
from plan_cases import Slice, manifest, members, recording, whole

from weight_sync.errors import ConfigError
from weight_sync.layout import Box, full_box
from weight_sync.manifest import TensorSpec
from weight_sync.plan import Plan, build_plan
from weight_sync.transports.broadcast_layout import broadcast_layout
from weight_sync.transports.packed import cut_stream, packed_strides
from weight_sync.transports.rounds import cut_rounds, reshard_steps, stream_bucket_bytes

W = TensorSpec("w", "bfloat16", (64, 8))
BIG = TensorSpec("big", "float32", (256, 4))
VALUE = TensorSpec("value", "uint8", (32,), unit="pair")
SCALE = TensorSpec("a.scale", "uint8", (4,), unit="pair")
SPECS = (W, BIG, VALUE, SCALE)


def plan(bucket_bytes: int = 1024) -> Plan:
    """Two ranks: one holds the upper half of ``w`` and all of the rest, one the lower half."""
    upper, lower = Box((0, 0), (32, 8)), Box((32, 0), (32, 8))
    manifests = [
        manifest(0, [(W, [upper]), *whole(BIG, VALUE, SCALE)]),
        manifest(1, [(W, [lower]), *whole(BIG, VALUE, SCALE)]),
    ]
    first = [Slice(s, full_box(s.shape)) for s in SPECS]
    second = [Slice(W, Box((16, 2), (32, 4))), *first[1:]]
    return build_plan(
        members(2, 2), manifests, [recording(first), recording(second)], bucket_bytes=bucket_bytes
    )


def test_blocks_of_a_broadcast_tile_every_region_that_is_read() -> None:
    layout = broadcast_layout(plan())
    regions = layout.plan.regions
    elements = np.bincount(layout.region, weights=layout.size.prod(axis=1))
    assert elements.tolist() == regions.size.prod(axis=1).tolist()


def test_parts_that_a_worker_keeps_tile_its_pieces() -> None:
    layout = broadcast_layout(plan())
    for c, pieces in enumerate(layout.plan.pieces):
        keeps = layout.keeps(c)
        elements = np.bincount(keeps.row.unpack(), weights=keeps.size.unpack().prod(axis=1))
        order = layout.plan.orders[c]
        assert elements.tolist() == pieces.size[order].prod(axis=1).tolist()


def test_blocks_do_not_overlap_in_their_buckets() -> None:
    layout = broadcast_layout(plan())
    item = layout.plan.catalogue.itemsizes()[layout.plan.regions.tensor[layout.region]]
    end = layout.start + layout.size.prod(axis=1) * item
    for bucket in range(len(layout.nbytes)):
        mine = np.flatnonzero(layout.bucket == bucket)
        order = mine[np.argsort(layout.start[mine])]
        assert (end[order][:-1] <= layout.start[order][1:]).all()
        assert end[order][-1] <= layout.nbytes[bucket]


def test_regions_larger_than_a_bucket_are_cut_into_blocks_that_fit() -> None:
    layout = broadcast_layout(plan(bucket_bytes=1024))
    assert layout.nbytes.max() <= 1024
    assert BIG.name == layout.plan.catalogue.tensors[1].name
    assert (layout.plan.regions.tensor[layout.region] == 1).sum() == 4


def test_replicas_are_shared_out_among_their_owners() -> None:
    layout = broadcast_layout(plan())
    sent = np.bincount(layout.root, weights=layout.nbytes)
    # Each has half of w; one takes the large tensor, the other the pair.
    assert sorted(sent.tolist()) == [512 + 512, 512 + 4096]


def test_a_unit_is_in_one_bucket_of_one_root() -> None:
    layout = broadcast_layout(plan())
    unit = layout.plan.units[layout.plan.regions.tensor[layout.region]]
    assert len(set(layout.bucket[unit >= 0].tolist())) == 1


def test_rounds_may_end_only_where_no_region_goes_on() -> None:
    layout = broadcast_layout(plan())
    for bucket in np.flatnonzero(~layout.closed).tolist():
        here = set(layout.region[layout.bucket == bucket].tolist())
        after = set(layout.region[layout.bucket == bucket + 1].tolist())
        assert here & after


def test_what_is_kept_counts_every_piece_once() -> None:
    layout = broadcast_layout(plan())
    pieces = layout.plan.pieces[1]
    padded = (-(-pieces.nbytes // 256) * 256).sum()
    assert layout.kept_bytes(1).sum() == padded


def test_both_sides_of_a_reshard_stream_cut_the_same_buckets() -> None:
    made = plan()
    bucket_bytes = stream_bucket_bytes(made)
    for worker in range(2):
        program = made.receiver_program(worker)
        sender = program.sender.unpack()
        size = program.size.unpack().astype(np.int64)
        dtype = np.array(program.wire_dtype)
        source = made.recordings[program.class_id].source.unpack()[program.slice.unpack()]
        item = np.array([{"bfloat16": 2, "float32": 4, "uint8": 1}[d] for d in dtype[source]])
        for rank in range(2):
            rows = np.flatnonzero(sender == rank)
            unit = program.unit.unpack()[rows].astype(np.int32)
            got = cut_stream(rows, size[rows], item[rows], unit, bucket_bytes)
            (task,) = [t for t in made.sender_program(rank).sends if t.worker == worker]
            assert (task.size.unpack() == size[rows]).all()
            assert (task.unit.unpack() == unit).all()
            # Compared with what the control plane counts for rounds.
            steps = reshard_steps(made, bucket_bytes)[worker]
            assert got.count <= len(steps)


def test_reshard_steps_count_every_needed_byte() -> None:
    made = plan()
    steps = reshard_steps(made, 1024)
    for worker, c in enumerate(made.worker_class):
        assert steps[worker].sum() == (-(-made.pieces[c].nbytes // 256) * 256).sum()


def test_packed_strides_are_those_of_dense_boxes() -> None:
    size = np.array([[2, 3, 4], [1, 1, 5]])
    assert packed_strides(size).tolist() == [[12, 4, 1], [5, 5, 1]]


ALL = np.ones(6, bool)


def test_one_round_if_everything_fits() -> None:
    assert cut_rounds(np.full((2, 6), 10), [60, 100], ALL) == (6,)


def test_rounds_take_half_of_the_smallest_memory_each() -> None:
    assert cut_rounds(np.full((2, 6), 10), [40, 100], ALL) == (2, 4, 6)


def test_rounds_end_only_at_closed_steps() -> None:
    closed = np.isin(np.arange(9), [2, 3, 6, 8])
    assert cut_rounds(np.full((1, 9), 10), [80], closed) == (4, 7, 9)


def test_a_step_that_fits_into_no_round_is_refused_with_what_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"worker 1 has 30 bytes .* at least 40"):
        cut_rounds(np.array([[1, 1], [20, 20]]), [100, 30], np.ones(2, bool))
