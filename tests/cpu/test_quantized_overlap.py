"""Quantizing overlaps the wire: a bucket waits for its own pieces, a refusal for all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch

from bench.models import config, random_weights
from tests.harness.sources import rows
from tests.harness.staged import Hook, Staged, staged
from tests.harness.standin import StandinModel
from tests.harness.standin_quantized import load_quantized, quantized
from weight_sync.errors import QuantizationError, RefitError
from weight_sync.quantize.format import Format
from weight_sync.sources import quantized_chunks
from weight_sync.transports.registry import GROUPED

pytestmark = pytest.mark.timeout(90)

CFG = config("tiny-fp8")
FORM = Format.MXFP8
# Every stream has several buckets.
BUCKET = 128 << 10
Weights = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def a_chunk_per_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_chunks, "CHUNK_BYTES", 1)


@pytest.fixture(params=GROUPED)
def grouped(request: pytest.FixtureRequest) -> str:
    return request.param


def made(version: int) -> Weights:
    return random_weights(CFG, version)


def engine(version: int, tp: int = 1) -> list[StandinModel]:
    weights = made(version)
    return [load_quantized(quantized(CFG, FORM, r, tp), FORM, weights) for r in range(tp)]


def bits(model: StandinModel) -> Weights:
    return {n: t.contiguous().view(torch.uint8).clone() for n, t in model.tensors().items()}


def different(model: StandinModel, want: Mapping[str, torch.Tensor]) -> list[str]:
    have = bits(model)
    return [n for n, t in want.items() if not torch.equal(t, have[n])]


def fill(held: Weights, version: int) -> None:
    for name, tensor in made(version).items():
        held[name].copy_(tensor)


def before_last_chunk(hook: Hook) -> int:
    """Bytes that were quantized before the last chunk of any version so far."""
    return max(offset for stage, offset in hook.seen if stage == "quantize")


def last_matrix(setup: Staged) -> str:
    """What the last chunk of the last rank holds."""
    source = setup.endpoints[-1]._served.quantized
    assert source is not None
    return source._parts[source._order[-1]].spec.name


def hold_last_chunk(hook: Hook, until: Callable[[], bool]) -> None:
    """The next version's last chunk begins only when ``until`` says so, and fails if it does not.

    A version must have been sent before, so that it is known where the last chunk begins.
    """

    def wait() -> None:
        assert until(), "the last chunk was waited for"

    hook.at("quantize", wait, offset=before_last_chunk(hook))


def first_bucket_left(hook: Hook) -> threading.Event:
    """Set when the first bucket of the next version was received: the second is begun then."""
    left = threading.Event()
    hook.at("transfer", left.set, offset=1)
    return left


@pytest.fixture
def one(grouped: str) -> Iterator[tuple[Staged, Weights]]:
    """One trainer rank and one worker that both hold version 1."""
    held = made(1)
    with staged(grouped, [held], engine(0), bucket_bytes=BUCKET) as setup:
        setup.sync(1)
        setup.shard.log.clear()
        yield setup, held


@pytest.mark.parametrize("verify", [True, False])
def test_first_bucket_is_received_before_the_last_chunk_is_quantized(
    one: tuple[Staged, Weights], verify: bool
) -> None:
    setup, held = one
    (hook,) = setup.trainer_hooks
    fill(held, 2)
    left = first_bucket_left(hook)
    hold_last_chunk(hook, lambda: left.wait(10))
    setup.sync(2, verify=verify)
    assert left.is_set()
    assert different(setup.shard.models[0], bits(*engine(2))) == []


@pytest.mark.parametrize("verify", [True, False])
def test_infinity_in_the_last_chunk_is_refused_before_anything_live_changes(
    one: tuple[Staged, Weights], verify: bool
) -> None:
    setup, held = one
    (hook,) = setup.trainer_hooks
    before = bits(setup.shard.models[0])
    fill(held, 2)
    name = last_matrix(setup)
    held[name][3, 5] = float("inf")
    left = first_bucket_left(hook)
    hold_last_chunk(hook, lambda: left.wait(10))
    with pytest.raises(QuantizationError, match=rf"{name} \(1\)"):
        setup.sync(2, verify=verify)
    assert left.is_set()
    assert setup.shard.log == []
    assert different(setup.shard.models[0], before) == []
    fill(held, 3)
    assert setup.sync(3).verified  # type: ignore[attr-defined]
    assert different(setup.shard.models[0], bits(*engine(3))) == []


def test_infinity_is_refused_before_the_first_of_several_rounds_is_installed(grouped: str) -> None:
    held = made(1)
    with staged(grouped, [held], engine(0), bucket_bytes=BUCKET, stage_bytes=800 << 10) as setup:
        setup.sync(1)
        conductor = setup.synchronizer._conductor
        assert conductor is not None
        assert conductor.later_rounds
        setup.shard.log.clear()
        name = last_matrix(setup)
        held[name].fill_(float("-inf"))
        with pytest.raises(QuantizationError, match=name):
            setup.sync(2)
        assert setup.shard.log == []
        assert different(setup.shard.models[0], bits(*engine(1))) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_infinity_on_one_of_two_ranks_stops_both(grouped: str, rank: int) -> None:
    full = made(1)
    ranks = [
        {n: rows(t, r * len(t) // 2, (r + 1) * len(t) // 2) for n, t in full.items()}
        for r in range(2)
    ]
    with staged(grouped, ranks, engine(0, tp=2), bucket_bytes=BUCKET) as setup:
        setup.sync(1)
        setup.shard.log.clear()
        want = [bits(model) for model in engine(1, tp=2)]
        name = last_matrix(setup)
        ((_, part),) = ranks[rank][name].parts
        keep = part[0, 0].clone()
        part[0, 0] = float("inf")
        with pytest.raises(QuantizationError, match=name):
            setup.sync(2)
        assert setup.shard.log == []
        assert [different(m, w) for m, w in zip(setup.shard.models, want, strict=True)] == [[], []]
        part[0, 0] = keep
        setup.sync(3)
        assert [different(m, w) for m, w in zip(setup.shard.models, want, strict=True)] == [[], []]


def test_there_and_back_is_the_same_on_every_worker(grouped: str) -> None:
    held = made(0)
    with staged(grouped, [held], engine(5, tp=2), bucket_bytes=BUCKET) as setup:
        for version, weights in ((1, 0), (2, 1), (3, 0)):
            fill(held, weights)
            setup.sync(version)
            for model, want in zip(setup.shard.models, engine(weights, tp=2), strict=True):
                assert different(model, bits(want)) == []


def test_chunks_are_made_in_the_order_in_which_buckets_need_them(
    one: tuple[Staged, Weights],
) -> None:
    """Only the last bucket with a matrix waits for the last chunk, whatever the names' order."""
    setup, held = one
    (hook,), (endpoint,) = setup.trainer_hooks, setup.endpoints
    sender, source = endpoint._sender, endpoint._served.quantized
    assert sender is not None
    assert source is not None
    begin, at = 0, 0
    for ((sending,),) in zip(sender._steps, strict=True):
        if (source._part_of[sending.packer.regions(sending.bucket)] >= 0).any():
            begin = at
        at += sending.nbytes
    reached = threading.Event()
    hook.at("transfer", reached.set, offset=begin)
    hold_last_chunk(hook, lambda: reached.wait(10))
    fill(held, 2)
    setup.sync(2)
    assert reached.is_set()


def test_quantizing_that_fails_ends_the_refit_and_the_next_one_is_good(
    one: tuple[Staged, Weights],
) -> None:
    setup, held = one
    (hook,) = setup.trainer_hooks

    def fail() -> None:
        raise RuntimeError("the test wants it")

    hook.at("quantize", fail, offset=before_last_chunk(hook))
    fill(held, 2)
    with pytest.raises(RefitError, match="quantizing did not end: the test wants it"):
        setup.sync(2)
    assert setup.shard.log == []
    assert different(setup.shard.models[0], bits(*engine(1))) == []
    setup.sync(3)
    assert different(setup.shard.models[0], bits(*engine(2))) == []


# --- ipc: bytes go straight into live memory -----------------------------------------------------


def test_ipc_waits_for_everything_before_engines_pause() -> None:
    held = made(1)
    with staged("ipc", [held], engine(0)) as setup:
        setup.sync(1)
        setup.shard.log.clear()
        (hook,) = setup.trainer_hooks
        logs: list[list[str]] = []
        paused = threading.Event()

        def note() -> None:
            # Longer than the rest takes if nobody waits.
            paused.wait(0.5)
            logs.append(list(setup.shard.log))

        hook.at("quantize", note, offset=before_last_chunk(hook))
        fill(held, 2)
        setup.sync(2)
        assert logs == [[]]
        assert different(setup.shard.models[0], bits(*engine(2))) == []


def test_host_memory_is_not_shared_while_it_is_written() -> None:
    """Sharing moves it, so an epoch that is built meanwhile waits."""
    held = made(1)
    with staged("ipc", [held], engine(0)) as setup:
        setup.sync(1)
        (hook,), (endpoint,) = setup.trainer_hooks, setup.endpoints
        endpoint.forget()
        fill(held, 2)
        asked, ended = threading.Event(), threading.Event()

        def hold() -> None:
            assert asked.wait(10)
            ended.wait(0.3)
            ended.set()

        hook.at("connect", asked.set)
        hook.at("quantize", hold, offset=before_last_chunk(hook))
        endpoint.publish(2)
        setup.synchronizer.init_communicator()
        assert ended.is_set()
        setup.synchronizer.sync_weights(2)
        assert different(setup.shard.models[0], bits(*engine(2))) == []
