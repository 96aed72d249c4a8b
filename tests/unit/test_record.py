"""What recording makes of loaders: slices, constants, and modules it cannot express."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from weight_sync.manifest import TensorSpec
from weight_sync.worker.model import UnitView
from weight_sync.worker.record import RawRecording, record

Tensors = dict[str, torch.Tensor]
Load = Callable[[Tensors, torch.Tensor], None]


class View:
    """A loading view of one unit with one parameter of the given shape."""

    def __init__(self, shape: tuple[int, ...], load: Load, dtype: str = "float32") -> None:
        parameter = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        self.units = (UnitView("layer", {"weight": parameter}, frozenset()),)
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self._load(dict(self.units[0].tensors), tensor)


def recorded(
    source: tuple[int, ...], parameter: tuple[int, ...], load: Load, dtype: str = "float32"
) -> RawRecording:
    return record(View(parameter, load, dtype), [TensorSpec("w", "float32", source)])


def replay(raw: RawRecording, source: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Copies element by element what the recording says."""
    flat = parameter.reshape(-1)
    for piece in raw.slices:
        mapped = piece.mapped
        at = tuple(slice(o, o + n) for o, n in zip(mapped.box.offset, mapped.box.size, strict=True))
        flat.as_strided(mapped.box.size, mapped.dst_stride, mapped.dst_offset).copy_(source[at])
    return parameter


LOADS: dict[str, tuple[tuple[int, ...], tuple[int, ...], Load]] = {
    "whole": ((4, 6), (4, 6), lambda p, w: p["weight"].copy_(w)),
    "rows of a fused parameter": (
        (4, 6),
        (10, 6),
        lambda p, w: p["weight"].narrow(0, 3, 4).copy_(w),
    ),
    "columns of a shard": ((4, 6), (4, 3), lambda p, w: p["weight"].copy_(w.narrow(1, 3, 3))),
    "transposed": ((4, 6), (6, 4), lambda p, w: p["weight"].copy_(w.t())),
    "reshaped": ((4, 6), (2, 2, 6), lambda p, w: p["weight"].copy_(w.view(2, 2, 6))),
    "every other row": ((4, 6), (2, 6), lambda p, w: p["weight"].copy_(w[1::2])),
    "one expert": ((4, 6), (3, 4, 6), lambda p, w: p["weight"][2].copy_(w)),
    "a slice of a copy": (
        (4, 6),
        (2, 6),
        lambda p, w: p["weight"].copy_(w.contiguous().clone()[2:]),
    ),
    "chunked and cast": (
        (4, 6),
        (2, 6),
        lambda p, w: p["weight"].copy_(w.to(torch.bfloat16).chunk(2)[1]),
    ),
    "scalar": ((), (), lambda p, w: p["weight"].copy_(w)),
}


@pytest.mark.parametrize("name", LOADS)
def test_replaying_a_recording_does_what_the_loader_does(name: str) -> None:
    source_shape, parameter_shape, load = LOADS[name]
    raw = recorded(source_shape, parameter_shape, load)
    assert not raw.unreadable
    assert raw.read == {0}
    source = torch.randperm(max(torch.Size(source_shape).numel(), 1)).float().reshape(source_shape)
    want = torch.full(parameter_shape, -1.0)
    load({"weight": want}, source)
    assert torch.equal(replay(raw, source, torch.full(parameter_shape, -1.0)), want)


COMPUTED: dict[str, Load] = {
    "computed values": lambda p, w: p["weight"].copy_(-torch.exp(w)),
    "in place": lambda p, w: p["weight"].add_(w),
    "broadcast": lambda p, w: p["weight"].copy_(w[0]),
    "values of no tensor": lambda p, w: p["weight"].copy_(torch.ones(4, 6, device="meta")),
    "assembled": lambda p, w: p["weight"].copy_(torch.cat([w[2:], w[:2]])),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_no_slice_makes_the_module_unreadable_with_a_reason(name: str) -> None:
    raw = recorded((4, 6), (4, 6), COMPUTED[name])
    assert set(raw.unreadable) == {0}
    assert raw.unreadable[0].startswith("weight: ")


def test_constants_are_recorded_as_fills() -> None:
    def load(p: Tensors, w: torch.Tensor) -> None:
        p["weight"][:4].copy_(w)
        p["weight"][4:].fill_(0)

    raw = recorded((4, 6), (6, 6), load)
    assert [(f.view.offset, f.view.size, f.value) for f in raw.fills] == [(24, (2, 6), 0.0)]


def test_a_scalar_written_by_value_is_still_read_from_its_tensor() -> None:
    raw = recorded((1,), (1,), lambda p, w: p["weight"].fill_(w.item()))
    assert raw.read == {0}
    assert len(raw.slices) == 1
    assert raw.fills == []


def test_a_tensor_without_elements_counts_as_read() -> None:
    raw = recorded((0, 6), (0, 6), lambda p, w: p["weight"].copy_(w))
    assert raw.read == {0}
    assert raw.slices == []


def test_a_tensor_that_no_loader_touches_is_not_read() -> None:
    raw = recorded((4, 6), (4, 6), lambda p, w: None)
    assert raw.read == set()
    assert raw.slices == []
