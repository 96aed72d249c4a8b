"""Stage and commit of broadcast and reshard: what comes before the pause, and failures."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from tests.harness.sources import rows
from tests.harness.staged import Staged, blank, staged
from weight_sync.errors import (
    AbortedError,
    ConfigError,
    DeadlineError,
    RefitError,
    VerifyError,
)
from weight_sync.transports.registry import GROUPED

pytestmark = [pytest.mark.timeout(90), pytest.mark.parametrize("transport", GROUPED)]

BUCKET = 4096
SIZE = 40_000


def weights(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"first": torch.full((SIZE,), float(value)), "second": torch.full((SIZE,), float(value))}


def halves(held: dict[str, torch.Tensor]) -> list[dict]:
    """Two ranks, each with half of every tensor."""
    middle = SIZE // 2
    return [
        {n: rows(t, 0, middle) for n, t in held.items()},
        {n: rows(t, middle, SIZE) for n, t in held.items()},
    ]


def fill(ranks: list[dict], value: float) -> None:
    for held in ranks:
        for one in held.values():
            for _, tensor in one.parts:
                tensor.fill_(value)


def fail() -> None:
    raise RuntimeError("the test wants it")


def live(setup: Staged, worker: int = 0) -> set[float]:
    return {v for n in ("first", "second") for v in setup.value(n, worker).unique().tolist()}


def test_everything_is_received_and_verified_before_the_engine_pauses(transport: str) -> None:
    ranks = halves(weights(1))
    with staged(transport, ranks, [blank(weights())], bucket_bytes=BUCKET) as setup:
        at: dict[str, tuple[list[str], set[float]]] = {}
        for stage in ("verify", "install"):

            def note(stage: str = stage) -> None:
                at[stage] = (list(setup.shard.log), live(setup))

            setup.worker_hooks[0].at(stage, note)
        setup.sync(1)
        assert at == {"verify": ([], {0.0}), "install": (["pause"], {0.0})}
        assert live(setup) == {1.0}


def test_bytes_that_changed_on_the_way_never_become_live(transport: str) -> None:
    ranks = halves(weights(1))
    with staged(transport, ranks, [blank(weights())], bucket_bytes=BUCKET) as setup:
        setup.sync(1)
        fill(ranks, 2)

        def corrupt() -> None:
            setup.receiver()._arenas[0][5] ^= 1

        setup.worker_hooks[0].at("verify", corrupt)
        with pytest.raises(VerifyError, match=r"first|second") as failed:
            setup.sync(2)
        assert failed.value.ranks == ("shard 0 worker 0",)
        assert live(setup) == {1.0}
        assert not setup.synchronizer.is_stale
        assert setup.synchronizer.shard_versions == (1,)
        setup.sync(3)
        assert live(setup) == {2.0}


def test_the_report_keeps_transfer_and_pause_apart(transport: str) -> None:
    with staged(transport, halves(weights(1)), [blank(weights())], bucket_bytes=BUCKET) as setup:
        setup.sync(1)

        def slow() -> None:
            time.sleep(0.3)

        setup.trainer_hooks[0].at("transfer", slow, offset=1)
        report = setup.sync(2)
    assert report.seconds["transfer"] >= 0.3
    assert report.pause_seconds < 0.3
    assert report.seconds["commit"] <= report.pause_seconds


@pytest.mark.parametrize("budget", [48_000, 100_000])
def test_weights_larger_than_the_spare_memory_arrive_in_rounds_that_fit(
    transport: str, budget: int
) -> None:
    held = {f"t{i}": torch.full((4096,), float(i)) for i in range(12)}
    with staged(transport, [held], [blank(held)], bucket_bytes=BUCKET, stage_bytes=budget) as setup:
        setup.sync(1)
        assert len(setup.receiver()._rounds) > 1
        assert setup.receiver().extra_bytes <= budget
        for i in range(12):
            assert setup.value(f"t{i}").unique().tolist() == [float(i)]
        for tensor in held.values():
            tensor.add_(100)
        setup.sync(2)
        for i in range(12):
            assert setup.value(f"t{i}").unique().tolist() == [float(i + 100)]


def test_spare_memory_too_small_for_one_round_is_refused_before_anything_changes(
    transport: str,
) -> None:
    with (
        staged(transport, [weights(1)], [blank(weights())], stage_bytes=1000) as setup,
        pytest.raises(ConfigError, match="stage_bytes"),
    ):
        setup.sync(1)
    assert live(setup) == {0.0}


def failing(setup: Staged, who: str, stage: str, offset: int) -> Callable[[], None]:
    hooks = setup.trainer_hooks if who == "trainer" else setup.worker_hooks
    return lambda: hooks[1].at(stage, fail, offset)


@pytest.mark.parametrize("offset", [0, 1, 60_000])
@pytest.mark.parametrize("who", ["trainer", "worker"])
def test_a_rank_that_fails_in_the_transfer_fails_all_at_once_and_changes_nothing(
    transport: str, who: str, offset: int
) -> None:
    ranks = halves(weights(1))
    models = [blank(weights()) for _ in range(2)]
    with staged(transport, ranks, models, bucket_bytes=BUCKET) as setup:
        setup.sync(1)
        fill(ranks, 2)
        failing(setup, who, "transfer", offset)()
        start = time.monotonic()
        with pytest.raises(RefitError, match="the test wants it") as failed:
            setup.sync(2)
        assert time.monotonic() - start < 10
        name = "trainer 1" if who == "trainer" else "shard 0 worker 1"
        assert failed.value.ranks == (name,)
        assert [live(setup, w) for w in (0, 1)] == [{1.0}, {1.0}]
        assert not setup.synchronizer.is_stale
        setup.sync(3)
        assert setup.synchronizer.membership.epoch == 2
        assert [live(setup, w) for w in (0, 1)] == [{2.0}, {2.0}]


@pytest.mark.parametrize("who", ["trainer", "worker"])
def test_a_rank_that_stalls_in_the_transfer_is_named_in_time(transport: str, who: str) -> None:
    ranks = halves(weights(1))
    models = [blank(weights()) for _ in range(2)]
    with staged(transport, ranks, models, bucket_bytes=BUCKET) as setup:
        setup.sync(1)
        waking = threading.Event()
        hooks = setup.trainer_hooks if who == "trainer" else setup.worker_hooks
        hooks[1].at("transfer", lambda: waking.wait(30) and None, offset=1)
        start = time.monotonic()
        with pytest.raises((DeadlineError, AbortedError)) as failed:
            setup.sync(2, deadline_s=3.0)
        took = time.monotonic() - start
        waking.set()
        name = "trainer 1" if who == "trainer" else "shard 0 worker 1"
        assert name in " ".join([str(failed.value), *failed.value.__notes__])
        assert took < 6.0
        assert live(setup) == {1.0}


def test_an_abort_reaches_a_worker_that_receives_during_its_commit(transport: str) -> None:
    held = {f"t{i}": torch.full((4096,), float(i)) for i in range(12)}
    with staged(transport, [held], [blank(held)], bucket_bytes=BUCKET, stage_bytes=60_000) as setup:
        setup.sync(1)
        conductor = setup.synchronizer._conductor
        assert conductor is not None

        def abort() -> None:
            threading.Thread(target=conductor.abort, args=("somebody wants it",)).start()
            time.sleep(1.0)

        setup.trainer_hooks[0].at("transfer", abort, offset=100_000)
        start = time.monotonic()
        with pytest.raises(RefitError, match="somebody wants it"):
            setup.sync(2)
        assert time.monotonic() - start < 10
        assert setup.synchronizer.is_stale
        setup.sync(3)
        assert not setup.synchronizer.is_stale


def test_a_rank_that_cannot_join_is_named_at_once(transport: str) -> None:
    models = [blank(weights()) for _ in range(2)]
    with staged(transport, halves(weights(1)), models, bucket_bytes=BUCKET) as setup:
        setup.worker_hooks[1].at("connect", fail)
        start = time.monotonic()
        with pytest.raises(RefitError, match="the test wants it") as failed:
            setup.sync(1)
        assert time.monotonic() - start < 10
        assert failed.value.ranks == ("shard 0 worker 1",)
        setup.sync(2)
        assert live(setup, 1) == {1.0}


def test_workers_that_need_the_same_are_packed_for_once(transport: str) -> None:
    models = [blank(weights()) for _ in range(3)]
    with staged(transport, [weights(1)], models, bucket_bytes=BUCKET) as setup:
        setup.sync(1)
        sender = setup.endpoints[0]._sender
        assert sender is not None
        assert len(sender._packers) == 1
        assert [live(setup, w) for w in range(3)] == [{1.0}] * 3


def test_rebuilding_leaves_descriptors_and_threads_as_they_were(transport: str) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with staged(transport, halves(weights(1)), [blank(weights())], bucket_bytes=BUCKET) as setup:
        seen = []
        for version in range(1, 21):
            setup.sync(version)
            setup.synchronizer.init_communicator()
            seen.append(counts())
    settled = seen[3]
    assert max(fds for fds, _ in seen[4:]) <= settled[0] + 4
    assert max(threads for _, threads in seen[4:]) <= settled[1] + 4
