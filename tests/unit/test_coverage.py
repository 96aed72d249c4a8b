"""How many elements overlapping writes reach, and which parameters nobody wrote completely."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.standin import Loader, StandinModel, Tensors, Unit, copies
from weight_sync.errors import CoverageError
from weight_sync.manifest import TensorSpec
from weight_sync.strided import StridedView
from weight_sync.worker.coverage import covered
from weight_sync.worker.recorded import WorkerRecording, make_recording

F32 = torch.float32


def view_of(tensor: torch.Tensor) -> StridedView:
    return StridedView(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


@st.composite
def some_views(draw: st.DrawFn) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A small parameter and views of it: narrowed, stepped, transposed, repeated."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    parameter = torch.zeros(shape, dtype=torch.int32)
    views = []
    for _ in range(draw(st.integers(0, 5))):
        part = parameter
        for dim, size in enumerate(shape):
            first = draw(st.integers(0, size))
            last, step = draw(st.integers(first, size)), draw(st.sampled_from([1, 1, 2]))
            part = part[(slice(None),) * dim + (slice(first, last, step),)]
        views.append(part.transpose(0, -1) if draw(st.booleans()) else part)
    return parameter, views


@settings(max_examples=300, deadline=None)
@given(some_views())
def test_covered_counts_what_writing_ones_would(
    case: tuple[torch.Tensor, list[torch.Tensor]],
) -> None:
    parameter, views = case
    for view in views:
        view.fill_(1)
    assert covered(view_of(v) for v in views) == int(parameter.sum())


@pytest.mark.parametrize("dim", [1, 2])
def test_experts_of_a_large_parameter_are_counted_without_marking_elements(dim: int) -> None:
    """Gate and up of 128 experts, as rows and as columns."""
    parameter = torch.empty(128, 2048, 2048, device="meta")
    views = [
        view_of(parameter[e : e + 1].narrow(dim, first, 1024))
        for e in range(128)
        for first in (0, 1024)
    ]
    start = time.process_time()
    assert covered(views) == parameter.numel()
    assert time.process_time() - start < 0.2


def recorded(
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]],
    loaders: dict[str, list[Loader]],
    shape: tuple[int, ...],
) -> WorkerRecording:
    """The recording of one unit whose checkpoint tensors all have one shape."""
    model = StandinModel(
        [Unit("u", shapes)], {n: [("u", load) for load in loads] for n, loads in loaders.items()}
    )
    model._live = {"u": {n: torch.zeros(s, dtype=d) for n, (s, d) in shapes.items()}}
    return make_recording(model, [TensorSpec(n, "float32", shape) for n in loaders], ())


def first_half(tensors: Tensors, loaded: torch.Tensor) -> None:
    tensors["a"][:4].copy_(loaded)


def second_half(tensors: Tensors, loaded: torch.Tensor) -> None:
    tensors["a"][4:].copy_(loaded)


def doubled(tensors: Tensors, loaded: torch.Tensor) -> None:
    tensors["a"].copy_(loaded * 2)


def test_a_half_written_twice_does_not_stand_for_the_other_half() -> None:
    with pytest.raises(CoverageError) as refused:
        recorded({"a": ((8,), F32)}, {"x": [first_half, first_half]}, (4,))
    assert refused.value.unwritten == ("u.a (4 of 8 elements written)",)


def test_a_half_written_twice_beside_the_other_half_is_complete() -> None:
    loads = {"x": [first_half, first_half], "y": [second_half]}
    assert len(recorded({"a": ((8,), F32)}, loads, (4,)).recording.parameters) == 1


def test_a_computed_parameter_does_not_excuse_one_that_nobody_writes() -> None:
    with pytest.raises(CoverageError) as refused:
        recorded({"a": ((4,), F32), "b": ((4,), F32)}, {"x": [doubled]}, (4,))
    assert refused.value.unwritten == ("u.b (0 of 4 elements written)",)


def test_a_unit_with_a_computed_and_a_plain_parameter_is_loaded_whole() -> None:
    loads = {"x": [doubled], "y": [copies("b")]}
    made = recorded({"a": ((4,), F32), "b": ((4,), F32)}, loads, (4,)).recording
    assert [unit.mode for unit in made.units] == ["loader"]
