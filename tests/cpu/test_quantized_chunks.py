"""A source that is quantized chunk by chunk: who reads waits, who publishes or frees ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.harness.staged import Hook
from tests.harness.trainers import Holder
from weight_sync.comm.deadline import Deadline
from weight_sync.errors import DeadlineError, QuantizationError, RefitError
from weight_sync.quantize.format import Format
from weight_sync.quantize.reference import encode
from weight_sync.quantize.wanted import want
from weight_sync.sources import quantized_chunks
from weight_sync.sources.module import ModuleSource
from weight_sync.sources.quantized import QuantizedSource
from weight_sync.sources.quantized_chunks import cut_chunks

pytestmark = pytest.mark.timeout(30)

NAMES = ("a", "b", "c")
SHAPE = (32, 64)
# Values and scales of one matrix.
EACH = 32 * 64 + 32 * 2


class Chunks:
    """Three matrices in a chunk each, and a hook before every chunk."""

    def __init__(self, *forms: Format) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = {n: torch.randn(SHAPE, generator=generator) for n in NAMES}
        self.hook = Hook()
        specs = [
            want(f"{n}.weight", form, SHAPE)
            for n, form in zip(NAMES, forms or [Format.MXFP8] * 3, strict=True)
        ]
        module = Holder({f"{n}.weight": t for n, t in self.weights.items()})
        self.source = QuantizedSource(ModuleSource(module), specs, fault=self.hook)
        manifest = self.source.manifest(0, "host", "cpu")
        self.regions = {spec.name: i for i, (spec, _) in enumerate(manifest.regions())}

    def begin(self) -> None:
        self.source.ready()
        self.source.start()

    def hold(self, offset: int = EACH) -> threading.Event:
        """Keeps the chunk at ``offset`` from being made until the event is set."""
        go = threading.Event()
        self.hook.at("quantize", lambda: self._passed(go.wait(10)), offset=offset)
        return go

    @staticmethod
    def _passed(in_time: bool) -> None:
        assert in_time

    def wait(self, *names: str, seconds: float = 10) -> None:
        numbers = np.array([self.regions[f"{n}.weight"] for n in names], np.int64)
        self.source.wait(numbers, None, Deadline(seconds))

    def value(self, name: str) -> torch.Tensor:
        return self.source.region(self.regions[f"{name}.weight"]).view(torch.uint8)

    def good(self, name: str) -> bool:
        return torch.equal(self.value(name), encode(Format.MXFP8, self.weights[name]).value)


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Chunks:
    monkeypatch.setattr(quantized_chunks, "CHUNK_BYTES", 1)
    return Chunks()


def test_reader_waits_for_its_own_chunk_only(chunks: Chunks) -> None:
    go = chunks.hold()
    chunks.begin()
    chunks.wait("a")
    assert chunks.good("a")
    with pytest.raises(DeadlineError, match="1 of 3 chunks were quantized within"):
        chunks.wait("b", seconds=0.05)
    go.set()
    chunks.wait("c", "b")
    assert chunks.good("b")
    assert chunks.good("c")


def test_chunks_follow_the_order_that_was_arranged(chunks: Chunks) -> None:
    order = [chunks.regions[f"{n}.weight"] for n in ("c", "a")]
    chunks.source.arrange(np.array(order, np.int64))
    go = chunks.hold()
    chunks.begin()
    chunks.wait("c")
    assert chunks.good("c")
    with pytest.raises(DeadlineError):
        chunks.wait("a", seconds=0.05)
    go.set()
    # Nobody said when this one is needed, so it comes last.
    chunks.wait("b")
    assert all(chunks.good(n) for n in NAMES)


def test_check_waits_for_the_last_chunk_and_names_tensors_of_all(chunks: Chunks) -> None:
    chunks.weights["a"][0, 0] = chunks.weights["c"][0, 0] = torch.inf
    go = chunks.hold()
    chunks.begin()
    with pytest.raises(DeadlineError):
        chunks.source.check(0.05)
    go.set()
    with pytest.raises(QuantizationError, match=r"a\.weight \(1\), c\.weight \(1\)"):
        chunks.source.check()


@pytest.mark.parametrize(
    "end",
    [lambda source: source.forget(), lambda source: source.ready()],
    ids=["given back", "published anew"],
)
def test_nothing_is_written_after_an_earlier_version_was_ended(
    chunks: Chunks, end: Callable[[QuantizedSource], None]
) -> None:
    go = chunks.hold()
    chunks.begin()
    chunks.wait("a")
    memory = chunks.source._memory
    assert memory is not None
    waiting: list[BaseException] = []

    def reader() -> None:
        try:
            chunks.wait("c")
        except RefitError as error:
            waiting.append(error)

    thread = threading.Thread(target=reader)
    thread.start()
    threading.Timer(0.1, go.set).start()
    end(chunks.source)
    assert go.is_set()
    before = memory.clone()
    thread.join(10)
    # The held chunk had not begun: it is left out, as the one after it.
    assert chunks.hook.seen[-1] == ("quantize", EACH)
    assert "published anew or given back" in str(waiting[0])
    assert torch.equal(memory, before)
    assert "weight-sync-quantize" not in {t.name for t in threading.enumerate()}


def test_preparing_as_any_source_leaves_everything_readable(chunks: Chunks) -> None:
    chunks.hook.at("quantize", lambda: threading.Event().wait(0.1), offset=EACH)
    chunks.source.prepare()
    assert all(chunks.good(n) for n in NAMES)


def test_one_scale_per_matrix_is_made_before_the_chunks_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized_chunks, "CHUNK_BYTES", 1)
    mixed = Chunks(Format.MXFP8, Format.FP8_TENSOR, Format.FP8_BLOCK)
    mixed.source.ready()
    assert mixed.hook.seen == []
    expected = encode(Format.FP8_TENSOR, mixed.weights["b"])
    assert torch.equal(mixed.value("b"), expected.value)
    mixed.source.start()
    mixed.wait(*NAMES)
    assert torch.equal(mixed.value("c"), encode(Format.FP8_BLOCK, mixed.weights["c"]).value)
    assert mixed.good("a")


def test_small_parts_share_a_chunk_and_large_ones_are_whole() -> None:
    sizes = [1, 2, 1, 9, 1, 1]
    assert cut_chunks([0, 1, 2, 3, 4], sizes, 4) == [[0, 1, 2], [3], [4]]
    assert cut_chunks([5, 3, 0], sizes, 4) == [[5, 3], [0]]
    assert cut_chunks([], sizes, 4) == []
