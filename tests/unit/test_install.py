"""Programs that do not belong to a recording are refused; times add up per stage."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.harness.standin import StandinModel, Unit, takes
from weight_sync.arrays import pack
from weight_sync.errors import LayoutError
from weight_sync.layout import full_box
from weight_sync.manifest import TensorSpec, build_manifest
from weight_sync.membership import Membership
from weight_sync.plan import build_plan
from weight_sync.program import ReceiverProgram
from weight_sync.recording import Recording
from weight_sync.worker.install import Stopwatch, resolve
from weight_sync.worker.recorded import make_recording

SPECS = [TensorSpec("q", "float32", (4, 6)), TensorSpec("k", "float32", (2, 6))]


def planned() -> tuple[Recording, ReceiverProgram]:
    """Worker 1 of 2 of a fused ``[3, 6]`` parameter: two rows of q, one of k."""
    models = [
        StandinModel(
            [Unit("qk", {"weight": ((3, 6), torch.float32)})],
            {
                "q": [("qk", takes("weight", 0, rank, 2, 0, 2))],
                "k": [("qk", takes("weight", 0, rank, 2, 2, 1))],
            },
        )
        for rank in range(2)
    ]
    recordings = [make_recording(m, SPECS, ()).recording for m in models]
    manifest = build_manifest(0, "h", "cpu", [(s, [full_box(s.shape)]) for s in SPECS])
    plan = build_plan(Membership(1, 1, (0,), 2), [manifest], recordings)
    return recordings[1], plan.receiver_program(1)


def test_pieces_are_placed_in_the_loading_layout_of_their_parameter() -> None:
    recording, program = planned()
    pieces = resolve(recording, program)
    by_source = {
        recording.sources[int(recording.source.unpack()[s])].name: i
        for i, s in enumerate(program.slice.unpack())
    }
    q, k = by_source["q"], by_source["k"]
    assert pieces.dst_offset[q] == 0
    assert pieces.dst_offset[k] == 2 * 6
    assert pieces.index_offset[q] == 2 * 6
    assert pieces.index_offset[k] == 1 * 6
    assert int(pieces.nbytes.sum()) == 3 * 6 * 4


def test_a_piece_outside_its_recorded_slice_is_refused() -> None:
    recording, program = planned()
    wider = program.size.unpack().copy()
    wider[0, -2] += 1
    with pytest.raises(LayoutError, match="plan again"):
        resolve(recording, structs.replace(program, size=pack(wider)))


def test_a_slice_that_was_never_recorded_is_refused() -> None:
    recording, program = planned()
    beyond = np.full_like(program.slice.unpack(), 99)
    with pytest.raises(LayoutError, match="did not record"):
        resolve(recording, structs.replace(program, slice=pack(beyond)))


def test_stopwatch_adds_up_stages_also_when_they_raise() -> None:
    ticks = iter([0.0, 1.0, 5.0, 7.0])
    watch = Stopwatch(clock=lambda: next(ticks))
    with watch.stage("transfer"):
        pass
    with pytest.raises(ValueError, match="no"), watch.stage("transfer"):
        raise ValueError("no")
    assert watch.seconds["transfer"] == 3.0
