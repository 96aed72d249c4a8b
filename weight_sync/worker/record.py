"""Runs an engine's own loaders on storage-less tensors and writes down what they copy.

Every checkpoint tensor is a meta tensor with a storage of its own, and so is every parameter.
Whatever views a loader takes, the ``copy_`` at the end shows two storages with offsets, sizes and
strides, which is all that is needed. Operations that compute new values cannot be expressed as
slices; the modules they write become *loader* units and the report says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weight_sync.errors import LayoutError
from weight_sync.manifest import TensorSpec
from weight_sync.strided import MappedBox, StridedView, map_view
from weight_sync.worker.model import LoadingView

_aten = torch.ops.aten
# Same values, new storage: followed, so that a slice of the copy is a slice of the original.
_VALUE_PRESERVING = {_aten._to_copy.default, _aten.clone.default}
# Scalars handed out for ``.item()`` on a meta tensor; exact in float64, never a real weight.
_SENTINEL_BASE = 2.0**900


@dataclass(frozen=True)
class ParameterKey:
    """Where a destination lives: unit index and attribute name."""

    unit: int
    attribute: str


@dataclass(frozen=True)
class RecordedSlice:
    """One region of a checkpoint tensor and its place in a parameter's storage."""

    source: int
    parameter: ParameterKey
    mapped: MappedBox


@dataclass(frozen=True)
class RecordedFill:
    """A constant that loaders write, e.g. zeros in vocabulary padding."""

    parameter: ParameterKey
    view: StridedView
    value: float


@dataclass
class RawRecording:
    """What the loaders did, before modes are decided.

    Attributes:
        slices: In the order loaders wrote them.
        fills: Constants.
        unreadable: Unit index -> why it cannot be expressed as slices.
        computed: Their parameters that are not; which elements loaders write there is unknown.
        touched: Unit index -> sources that any of its loader calls used.
        read: Sources of which at least one element was used.
    """

    slices: list[RecordedSlice] = field(default_factory=list)
    fills: list[RecordedFill] = field(default_factory=list)
    unreadable: dict[int, str] = field(default_factory=dict)
    computed: set[ParameterKey] = field(default_factory=set)
    touched: dict[int, set[int]] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class _Origin:
    """A storage that holds (a view of) a checkpoint tensor; ``view`` None means computed values."""

    sources: frozenset[int]
    shape: tuple[int, ...]
    view: StridedView | None
    reason: str = ""


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _view(tensor: torch.Tensor) -> StridedView:
    return StridedView(int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))


class _Recorder(TorchDispatchMode):
    """Intercepts what loaders do between checkpoint tensors and parameters."""

    def __init__(self, source_shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.raw = RawRecording()
        self.source_shapes = source_shapes
        self._origins: dict[int, _Origin] = {}
        self._parameters: dict[int, ParameterKey] = {}
        self._alive: list[torch.Tensor] = []
        self._scalars: dict[float, int] = {}

    def add_source(self, index: int, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape)
        self._alive.append(tensor)
        self._origins[_storage(tensor)] = _Origin(frozenset([index]), shape, _view(tensor))

    def add_parameter(self, key: ParameterKey, tensor: torch.Tensor) -> None:
        self._alive.append(tensor)
        self._parameters.setdefault(_storage(tensor), key)

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch hands over its own operator objects
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        if func is _aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        if func is _aten._local_scalar_dense.default and _storage(args[0]) in self._origins:
            return self._scalar(args[0])
        constant = func in (_aten.fill_.Scalar, _aten.zero_.default)
        if constant and _storage(args[0]) in self._parameters:
            self._fill(args[0], float(args[1]) if len(args) > 1 else 0.0)
            return args[0]
        out = func(*args, **kwargs)
        self._follow(func, args, kwargs, out)
        return out

    def _follow(
        self,
        func: Any,  # noqa: ANN401 - torch hands over its own operator objects
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: object,
    ) -> None:
        inputs = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_tensor(t)]
        outputs = [t for t in torch.utils._pytree.tree_leaves(out) if _is_tensor(t)]
        known = {_storage(t) for t in inputs}
        origins = [self._origins[s] for s in known if s in self._origins]
        parameters = [self._parameters[s] for s in known if s in self._parameters]
        if not origins and not parameters:
            return
        for tensor in outputs:
            storage = _storage(tensor)
            if storage in known:
                if func._schema.is_mutable and storage in self._parameters:
                    self._spoil(self._parameters[storage], f"loader ran {func} in place", origins)
                continue
            self._alive.append(tensor)
            first = inputs[0]
            if func in _VALUE_PRESERVING and origins and len(inputs) == 1:
                origin = self._origins[_storage(first)]
                if origin.view is not None:
                    self._origins[storage] = self._composed(origin, first, tensor)
                    continue
            sources = frozenset(s for o in origins for s in o.sources)
            self._origins[storage] = _Origin(
                sources, tuple(tensor.shape), None, f"loader computes values with {func}"
            )

    def _composed(self, origin: _Origin, viewed: torch.Tensor, copy: torch.Tensor) -> _Origin:
        assert origin.view is not None
        if not copy.is_contiguous() or len(origin.sources) != 1:
            return _Origin(
                origin.sources, tuple(copy.shape), None, "loader copies with a new layout"
            )
        view = _view(viewed)
        if origin.view.stride != _row_major(origin.shape):
            # A copy of a copy of a view: express it in the first tensor's coordinates.
            try:
                boxes = map_view(origin.shape, view, view)
            except LayoutError as error:
                return _Origin(origin.sources, tuple(copy.shape), None, str(error))
            if len(boxes) != 1 or boxes[0].box.size != view.size:
                return _Origin(origin.sources, tuple(copy.shape), None, "loader nests copies")
            shift = sum(o * s for o, s in zip(boxes[0].box.offset, origin.view.stride, strict=True))
            view = StridedView(origin.view.offset + shift, view.size, origin.view.stride)
        return _Origin(origin.sources, tuple(copy.shape), view)

    def _copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        key = self._parameters.get(_storage(dst))
        origin = self._origins.get(_storage(src))
        if key is None:
            if origin is not None:
                # A temporary filled from a checkpoint tensor: values are no longer plain slices.
                self._origins[_storage(dst)] = _Origin(
                    origin.sources, tuple(dst.shape), None, "loader assembles a temporary"
                )
                self._alive.append(dst)
            return
        if origin is None:
            self._spoil(key, "loader writes values that are in no checkpoint tensor", [])
            return
        if origin.view is None:
            self._spoil(key, origin.reason, [origin])
            return
        if src.shape != dst.shape and torch.broadcast_shapes(src.shape, dst.shape) != dst.shape:
            raise LayoutError(f"{tuple(src.shape)} cannot be copied into {tuple(dst.shape)}")
        if src.shape != dst.shape:
            self._spoil(key, "loader broadcasts a checkpoint tensor", [origin])
            return
        (source,) = origin.sources
        self.raw.read.add(source)
        self.raw.touched.setdefault(key.unit, set()).add(source)
        try:
            for mapped in self._map(origin, _view(src), _view(dst)):
                self.raw.slices.append(RecordedSlice(source, key, mapped))
        except LayoutError as error:
            self._spoil(key, str(error), [origin])

    def _map(self, origin: _Origin, src: StridedView, dst: StridedView) -> Iterator[MappedBox]:
        assert origin.view is not None
        shape = self.source_shapes[next(iter(origin.sources))]
        if origin.shape == shape and origin.view.stride == _row_major(shape):
            yield from map_view(shape, src, dst)
            return
        for part in map_view(origin.shape, src, dst):
            shift = sum(o * s for o, s in zip(part.box.offset, origin.view.stride, strict=True))
            inner = StridedView(origin.view.offset + shift, part.box.size, origin.view.stride)
            yield from map_view(
                shape, inner, StridedView(part.dst_offset, part.box.size, part.dst_stride)
            )

    def _scalar(self, tensor: torch.Tensor) -> float:
        sentinel = _SENTINEL_BASE * (1.0 + len(self._scalars) * 2.0**-40)
        origin = self._origins[_storage(tensor)]
        if len(origin.sources) == 1 and origin.view is not None:
            self._scalars[sentinel] = next(iter(origin.sources))
        return sentinel

    def _fill(self, dst: torch.Tensor, value: float) -> None:
        key = self._parameters[_storage(dst)]
        if value in self._scalars:
            source = self._scalars[value]
            self.raw.read.add(source)
            self.raw.touched.setdefault(key.unit, set()).add(source)
            if math.prod(self.source_shapes[source]) != 1 or dst.numel() != 1:
                self._spoil(key, "loader spreads a scalar over a parameter", [])
                return
            rank = len(self.source_shapes[source])
            one = StridedView(0, (1,) * rank, (1,) * rank)
            at = StridedView(int(dst.storage_offset()), (1,) * rank, (1,) * rank)
            for mapped in map_view(self.source_shapes[source], one, at):
                self.raw.slices.append(RecordedSlice(source, key, mapped))
            return
        self.raw.fills.append(RecordedFill(key, _view(dst), value))

    def _spoil(self, key: ParameterKey, reason: str, origins: Sequence[_Origin]) -> None:
        self.raw.unreadable.setdefault(key.unit, f"{key.attribute}: {reason}")
        self.raw.computed.add(key)
        for origin in origins:
            self.raw.read |= origin.sources
            self.raw.touched.setdefault(key.unit, set()).update(origin.sources)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, out = 1, []
    for n in reversed(shape):
        out.append(stride)
        stride *= max(n, 1)
    return tuple(reversed(out))


def record(
    view: LoadingView,
    offers: Sequence[TensorSpec],
    notify: Callable[[int], None] | None = None,
) -> RawRecording:
    """Drives the loaders once over every offered checkpoint tensor.

    Args:
        view: The model in loading layout.
        offers: Tensors the trainer has; only names, dtypes and shapes are used.
        notify: Called with the number of tensors handed out so far.

    Returns:
        What the loaders copied.
    """
    recorder = _Recorder([spec.shape for spec in offers])
    before: dict[ParameterKey, int] = {}
    for number, unit in enumerate(view.units):
        for attribute, tensor in unit.tensors.items():
            key = ParameterKey(number, attribute)
            recorder.add_parameter(key, tensor)
            before[key] = _storage(tensor)

    def offered() -> Iterator[tuple[str, torch.Tensor]]:
        for index, spec in enumerate(offers):
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            recorder.add_source(index, tensor)
            if notify is not None:
                notify(index)
            yield spec.name, tensor

    with torch.no_grad(), recorder:
        view.load_weights(offered())
    for number, unit in enumerate(view.units):
        for attribute, tensor in unit.tensors.items():
            key = ParameterKey(number, attribute)
            if _storage(tensor) != before[key]:
                recorder._spoil(key, "loader replaced the parameter's storage", [])
    return recorder.raw
