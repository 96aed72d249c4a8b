"""Contract of every transport: workers that raise, stall or lie end in a named error, in time."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from tests.harness.contract import Setup, connecting, plain_model
from weight_sync.errors import DeadlineError, RefitError, VerifyError
from weight_sync.messages import Status, WorkerState, decode_worker_reply, encode

pytestmark = pytest.mark.timeout(60)

TIMEOUT = 2.0


def two_workers(connect: object, seconds: float = TIMEOUT) -> tuple[Setup, torch.Tensor]:
    source = torch.zeros(4096)
    models = [plain_model({"first": torch.zeros(4096), "second": torch.zeros(4096)}) for _ in "ab"]
    tensors = {"first": source, "second": torch.zeros(4096)}
    return connect([tensors], models, bucket_bytes=16384, deadline_s=seconds), source  # type: ignore[operator]


def worker_state(setup: Setup) -> WorkerState:
    reply = decode_worker_reply(setup.shard.agents[0].handle(encode(Status())))
    assert isinstance(reply, WorkerState)
    return reply


@pytest.mark.parametrize("stage", ["record", "attach", "connect"])
def test_b41_worker_that_raises_at_set_up_fails_the_refit_before_anything_changes(
    transport: str, stage: str
) -> None:
    with connecting(transport) as connect:
        setup, source = two_workers(connect)
        setup.faults[1].actions[stage] = ("raise", "worker says no")
        source.fill_(1)
        start = time.monotonic()
        with pytest.raises(RefitError, match="worker says no") as failed:
            setup.sync(1)
        assert time.monotonic() - start < 2 * TIMEOUT
        assert failed.value.ranks == ("shard 0 worker 1",)
        assert setup.synchronizer.is_stale
        assert setup.value("first").unique().tolist() == [0]
        setup.sync(2)
        assert setup.value("first", 1).unique().tolist() == [1]


def expect_stale_until_the_next_refit(name: str, stage: str) -> None:
    with connecting(name) as connect:
        setup, source = two_workers(connect)
        setup.sync(1)
        setup.faults[1].actions[stage] = ("raise", "worker says no")
        source.fill_(2)
        with pytest.raises(RefitError, match="worker says no") as failed:
            setup.sync(2)
        assert failed.value.ranks == ("shard 0 worker 1",)
        assert setup.synchronizer.is_stale
        assert setup.synchronizer.version == 1
        assert setup.synchronizer.shard_versions == (-1,)
        setup.sync(3)
        assert not setup.synchronizer.is_stale
        assert setup.value("first", 1).unique().tolist() == [2]


@pytest.mark.parametrize("stage", ["bucket 0", "last bucket"])
def test_b41_worker_that_raises_in_the_transfer_makes_the_shard_stale_until_the_next_refit(
    hooked: str, stage: str
) -> None:
    expect_stale_until_the_next_refit(hooked, stage)


def test_b41_worker_that_raises_between_buckets_makes_the_shard_stale_until_the_next_refit(
    packing: str,
) -> None:
    expect_stale_until_the_next_refit(packing, "bucket 1")


def test_b41_a_failed_refit_releases_every_trainer_rank_with_the_reason(hooked: str) -> None:
    with connecting(hooked) as connect:
        setup, _ = two_workers(connect)
        setup.faults[0].actions["bucket 0"] = ("raise", "worker says no")
        outcome: list[BaseException] = []

        def wait() -> None:
            try:
                setup.trainers.endpoints[0].wait(1, TIMEOUT * 2)
            except RefitError as error:
                outcome.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        with pytest.raises(RefitError):
            setup.sync(1)
        waiting.join(TIMEOUT)
        assert not waiting.is_alive()
        assert "worker says no" in str(outcome[0])


def test_b41_a_slow_but_live_worker_is_not_given_up(hooked: str) -> None:
    with connecting(hooked) as connect:
        setup, source = two_workers(connect)
        setup.sync(1)
        setup.faults[1].actions["bucket 0"] = ("sleep", 1.5)
        source.fill_(2)
        setup.sync(2)
        assert setup.value("first", 1).unique().tolist() == [2]


def test_b41_a_worker_that_stalls_is_a_deadline_error_that_names_its_shard(
    hooked: str,
) -> None:
    with connecting(hooked) as connect:
        setup, _ = two_workers(connect)
        setup.sync(1)
        setup.faults[1].actions["bucket 0"] = ("sleep", 3.0)
        start = time.monotonic()
        with pytest.raises(DeadlineError, match="shard 0") as failed:
            setup.sync(2, deadline_s=1.0)
        assert time.monotonic() - start < 2.0
        assert failed.value.version == 2
        assert setup.synchronizer.is_stale


def test_a_flipped_bit_is_found_and_names_its_tensor(hooked: str) -> None:
    with connecting(hooked) as connect:
        setup, source = two_workers(connect)
        setup.sync(1)
        setup.faults[0].actions["bucket 0"] = ("flip",)
        source.fill_(2)
        with pytest.raises(VerifyError, match="first") as failed:
            setup.sync(2)
        assert failed.value.ranks == ("shard 0 worker 0",)
        assert failed.value.version == 2
        assert setup.synchronizer.is_stale
        assert setup.synchronizer.version == 1
        assert worker_state(setup).version == 1
        assert worker_state(setup).torn


def test_a_flipped_bit_passes_unseen_without_verification(hooked: str) -> None:
    """Shows that the test above fails for the right reason."""
    with connecting(hooked) as connect:
        setup, source = two_workers(connect)
        setup.faults[0].actions["bucket 0"] = ("flip",)
        source.fill_(2)
        setup.sync(1, verify=False)
        assert setup.value("first").unique().numel() == 2


def test_a_trainer_that_never_publishes_is_named_and_nothing_changes(transport: str) -> None:
    with connecting(transport) as connect:
        setup, _ = two_workers(connect)
        setup.sync(1)
        with pytest.raises(DeadlineError, match="publish") as failed:
            setup.synchronizer.sync_weights(2, deadline_s=0.3)
        assert failed.value.ranks == ("trainer 0",)
        assert not setup.synchronizer.is_stale
        assert setup.synchronizer.shard_versions == (1,)
        setup.sync(3)
        assert setup.synchronizer.version == 3
