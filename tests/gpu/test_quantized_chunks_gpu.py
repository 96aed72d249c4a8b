"""Chunked quantization on a stream of its own: bit-equal, and readers wait for their chunk only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.harness.trainers import Holder
from weight_sync.comm.deadline import Deadline
from weight_sync.errors import DeadlineError, QuantizationError
from weight_sync.quantize.format import Format, scale_suffix
from weight_sync.quantize.reference import encode
from weight_sync.quantize.wanted import want
from weight_sync.sources import quantized_chunks
from weight_sync.sources.module import ModuleSource
from weight_sync.sources.quantized import QuantizedSource

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(60),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

FORMS = (Format.MXFP8, Format.FP8_BLOCK)
SHAPE = (640, 512)
NAMES = tuple(f"layer{i}.weight" for i in range(6))
# Far longer than everything else here, in cycles of a GPU of one to two GHz.
LONG = 3_000_000_000


class Late:
    """Before the last chunk, lets its stream do nothing for a while."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.armed = False

    def __call__(self, stage: str, offset: int = 0) -> None:
        if self.armed and offset >= self.at:
            self.armed = False
            torch.cuda._sleep(LONG)


class Setup:
    """Six matrices in three chunks."""

    def __init__(self, form: Format) -> None:
        self.form = form
        generator = torch.Generator().manual_seed(1)
        self.weights = {n: torch.randn(SHAPE, generator=generator).bfloat16().cuda() for n in NAMES}
        each = 640 * 512 + {Format.MXFP8: 640 * 16, Format.FP8_BLOCK: 4 * 5 * 4}[form]
        self.late = Late(4 * each)
        self.source = QuantizedSource(
            ModuleSource(Holder(self.weights)),
            [want(n, form, SHAPE) for n in NAMES],
            fault=self.late,
        )
        manifest = self.source.manifest(0, "host", "cuda:0")
        self.regions = {spec.name: i for i, (spec, _) in enumerate(manifest.regions())}

    def read(self, name: str, lane: torch.cuda.Stream) -> tuple[torch.Tensor, torch.Tensor]:
        """Value and scale of a matrix as the lane sees them, on the host."""
        numbers = [self.regions[name], self.regions[name + scale_suffix(self.form)]]
        self.source.wait(np.array(numbers, np.int64), lane, Deadline(20))
        with torch.cuda.stream(lane):
            value, scale = (self.source.region(n).clone() for n in numbers)
        lane.synchronize()
        return value.view(torch.uint8).cpu(), scale.cpu()

    def wrong(self, lanes: list[torch.cuda.Stream]) -> list[str]:
        out = []
        for number, name in enumerate(NAMES):
            value, scale = self.read(name, lanes[number % len(lanes)])
            # Only now: what wrote the weights may have been on its way on another stream.
            expected = encode(self.form, self.weights[name].cpu())
            if not (torch.equal(value, expected.value) and torch.equal(scale, expected.scale)):
                out.append(name)
        return out


def other_stream() -> torch.cuda.Stream:
    """One that cannot be the quantizing one: torch gives the same 32 of a priority in turn."""
    return torch.cuda.Stream(priority=-1)


@pytest.fixture(params=FORMS, ids=str)
def setup(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Setup:
    monkeypatch.setattr(quantized_chunks, "CHUNK_BYTES", 2 * 640 * 512 * 2)
    return Setup(request.param)


def test_chunks_read_on_other_streams_are_bit_equal_version_after_version(setup: Setup) -> None:
    lanes = [torch.cuda.Stream(priority=p) for p in (0, -1)]
    for factor in (1.0, -3.0, -1 / 3):
        with torch.cuda.stream(torch.cuda.Stream()):
            # Chunks come after what the publishing stream holds.
            torch.cuda._sleep(20_000_000)
            for tensor in setup.weights.values():
                tensor.mul_(factor)
            setup.source.ready()
            setup.source.start()
        assert setup.wrong(lanes) == []
        setup.source.check(20)


def test_lane_and_trainer_go_on_while_the_last_chunk_is_late(setup: Setup) -> None:
    lane = other_stream()
    setup.source.ready()
    setup.source.start()
    assert setup.wrong([lane]) == []
    for tensor in setup.weights.values():
        tensor.neg_()
    setup.late.armed = True
    setup.source.ready()
    setup.source.start()
    value, _ = setup.read(NAMES[0], lane)
    torch.cuda.current_stream().synchronize()
    with pytest.raises(DeadlineError, match="did not finish quantizing"):
        setup.source.check(0)
    assert torch.equal(value, encode(setup.form, setup.weights[NAMES[0]].cpu()).value)
    assert setup.wrong([lane]) == []


def test_infinity_in_a_late_chunk_is_refused_by_name(setup: Setup) -> None:
    setup.weights[NAMES[-1]][5, 7] = torch.inf
    setup.late.armed = True
    setup.source.ready()
    setup.source.start()
    with pytest.raises(QuantizationError, match=r"layer5\.weight \(1\)"):
        setup.source.check(20)
    setup.weights[NAMES[-1]][5, 7] = 0
    setup.source.prepare()
    setup.source.check(20)


def test_other_order_changes_no_bit_and_memory_stays(setup: Setup) -> None:
    setup.source.prepare()
    before = setup.source.fingerprint()
    order = [setup.regions[n] for n in reversed(NAMES)]
    setup.source.arrange(np.array(order, np.int64))
    lane = other_stream()
    # What programs and streams need when they are new may wait for everything on the GPU.
    setup.source.ready()
    setup.source.start()
    assert setup.wrong([lane]) == []
    for tensor in setup.weights.values():
        tensor.mul_(0.5)
    setup.late.armed = True
    setup.source.ready()
    setup.source.start()
    value, _ = setup.read(NAMES[-1], lane)
    with pytest.raises(DeadlineError):
        setup.source.check(0)
    assert torch.equal(value, encode(setup.form, setup.weights[NAMES[-1]].cpu()).value)
    assert setup.wrong([other_stream()]) == []
    assert setup.source.fingerprint() == before


def test_giving_back_waits_for_what_is_still_enqueued(setup: Setup) -> None:
    setup.late.armed = True
    setup.source.ready()
    setup.source.start()
    assert setup.source._chunks is not None
    stream = setup.source._chunks._stream
    assert stream is not None
    assert not stream.query()
    setup.source.forget()
    assert stream.query()
    setup.source.prepare()
    assert setup.wrong([other_stream()]) == []
