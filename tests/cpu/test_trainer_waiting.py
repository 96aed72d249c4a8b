"""However many callers wait for a trainer rank, what it can answer at once it answers."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.harness.local import LocalShard, LocalTrainers
from tests.harness.sources import BoxSource, whole
from tests.harness.standin import StandinModel, Unit, copies
from weight_sync.comm.deadline import Deadline
from weight_sync.errors import DeadlineError, EngineStateError, PlanMismatchError, RefitError
from weight_sync.messages import (
    AwaitVersion,
    Digests,
    Done,
    Exports,
    GetDigests,
    GetExports,
    GetManifest,
    Published,
    Release,
    encode,
)
from weight_sync.rollcall import Missing, roll_call
from weight_sync.synchronizer import WeightSynchronizer
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.trainer.waiting import waits
from weight_sync.worker.sleep import WEIGHTS, AlwaysAwake

pytestmark = pytest.mark.timeout(60)

CALLERS = 6


def one_trainer() -> LocalTrainers:
    return LocalTrainers([BoxSource({"a.weight": whole(torch.zeros(8))})])


def peers(trainers: LocalTrainers) -> list[TrainerPeer]:
    return [TrainerPeer(0, trainers.infos[0].address) for _ in range(CALLERS)]


def test_controllers_that_died_waiting_for_publish_do_not_keep_the_next_one_out() -> None:
    with one_trainer() as trainers:
        for peer in peers(trainers):
            with pytest.raises(DeadlineError):
                peer._client.call(encode(AwaitVersion(1, 1, 20.0, True)), Deadline(0.1), "publish")
            peer.close()
        new = TrainerPeer(0, trainers.infos[0].address)
        assert [t.name for t in new.manifest(Deadline(2)).tensors] == ["a.weight"]
        new.close()
        trainers.publish(1)  # Lets those that wait go.


def test_workers_that_wait_for_digests_do_not_hold_up_bytes() -> None:
    with one_trainer() as trainers, ThreadPoolExecutor(CALLERS) as pool:
        callers = peers(trainers)
        # The answer to either is that this trainer has no plan; what matters is when it comes.
        with trainers.endpoints[0]._hashing:
            asked = [
                pool.submit(p.call, GetDigests(1, "", 1, 0), Digests, Deadline(20), "verify")
                for p in callers
            ]
            new = TrainerPeer(0, trainers.infos[0].address)
            with pytest.raises(PlanMismatchError):
                new.call(GetExports(1, ""), Digests, Deadline(2), "connect")
            assert not any(future.done() for future in asked)
        for future in asked:
            with pytest.raises(PlanMismatchError):
                future.result(20)
        for peer in [*callers, new]:
            peer.close()


def test_a_trainer_that_is_about_to_publish_does_not_hold_up_who_asks_if_it_runs() -> None:
    with one_trainer() as trainers, ThreadPoolExecutor(1) as pool:
        trainers.publish(1)
        late, new = TrainerPeer(0, trainers.infos[0].address), trainers.infos[0].address
        with trainers.endpoints[0]._work:
            asked = pool.submit(
                late.call, AwaitVersion(1, 1, 20.0, False), Published, Deadline(20), "publish"
            )
            assert roll_call({"trainer 0": new}, 5.0) == Missing()
            assert not asked.done()
        assert asked.result(20).generation == 1
        late.close()


def test_who_waits_for_a_version_is_let_go_when_its_refit_ends() -> None:
    with one_trainer() as trainers, ThreadPoolExecutor(1) as pool:
        waiting, other = (TrainerPeer(0, trainers.infos[0].address) for _ in range(2))
        asked = pool.submit(
            waiting.call, AwaitVersion(1, 1, 20.0, False), Published, Deadline(20), "publish"
        )
        # Whether the wait has begun by then or not.
        other.call(Release(1, 1, "an engine is asleep"), Done, Deadline(5), "release")
        with pytest.raises(RefitError, match="ended before trainer 0 published 1"):
            asked.result(20)
        waiting.close()
        other.close()


def test_engines_that_sleep_are_named_without_waiting_for_trainers_to_publish() -> None:
    class Asleep(AlwaysAwake):
        asleep = frozenset({WEIGHTS})

    unit = Unit("a", {"weight": ((8,), torch.float32)})
    model = StandinModel([unit], {"a.weight": [("a", copies("weight"))]})
    shard = LocalShard([model.load({"a.weight": torch.ones(8)})])
    with one_trainer() as trainers, WeightSynchronizer(trainers.infos, [shard]) as synchronizer:
        synchronizer.init_communicator()
        # An engine that sleeps since it was attached: a recording needs its weights.
        (agent,) = shard.agents
        agent._sleep = Asleep()
        start = time.monotonic()
        with pytest.raises(EngineStateError, match="shard 0 worker 0 are asleep"):
            synchronizer.sync_weights(1, deadline_s=30)
        assert time.monotonic() - start < 10
        agent._sleep = AlwaysAwake()
        trainers.publish(1)
        assert synchronizer.sync_weights(1).verified


@pytest.mark.parametrize("request_bytes", [b"", b"\xc1", b"\x80", encode(GetManifest())])
def test_what_is_no_known_waiting_request_is_not_taken_for_one(request_bytes: bytes) -> None:
    assert not waits(request_bytes)


def test_a_request_that_waits_is_known_by_its_name() -> None:
    assert waits(encode(AwaitVersion(1, 1, 1.0, False)))


def test_host_memory_is_not_moved_to_be_shared_while_it_is_hashed() -> None:
    unit = Unit("a", {"weight": ((8,), torch.float32)})
    model = StandinModel([unit], {"a.weight": [("a", copies("weight"))]})
    model.load({"a.weight": torch.ones(8)})
    with (
        one_trainer() as trainers,
        WeightSynchronizer(trainers.infos, [LocalShard([model])]) as synchronizer,
    ):
        trainers.publish(1)
        synchronizer.sync_weights(1)
        plan = synchronizer.plan
        assert plan is not None
        request = GetExports(plan.membership.epoch, plan.digest)
        late, new = (TrainerPeer(0, trainers.infos[0].address) for _ in range(2))
        with trainers.endpoints[0]._hashing, pytest.raises(DeadlineError):
            late.call(request, Exports, Deadline(0.3), "connect")
        assert len(new.call(request, Exports, Deadline(20), "connect").storages) == 1
        late.close()
        new.close()
