"""Who takes part, what may serve, and what old epochs may still do; stand-ins of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch

from tests.harness.faults import Actions, Faults
from tests.harness.local import LocalShard, LocalTrainers
from tests.harness.sources import BoxSource, whole
from tests.harness.standin import StandinModel, Unit, copies
from weight_sync.comm.deadline import Deadline
from weight_sync.engine import LocalLLM
from weight_sync.errors import (
    ConfigError,
    DeadlineError,
    EngineStateError,
    MembershipError,
    NoSurvivingShardsError,
    PeerDeadError,
    RefitError,
    StaleEpochError,
)
from weight_sync.failures import to_error
from weight_sync.messages import (
    Commit,
    Done,
    SendRounds,
    Status,
    WorkerState,
    decode_worker_reply,
    encode,
)
from weight_sync.synchronizer import WeightSynchronizer
from weight_sync.trainer.peer import TrainerPeer

pytestmark = pytest.mark.timeout(60)

SHAPE = (8, 16)
DEADLINE = 20.0


def weights(version: int) -> torch.Tensor:
    return torch.full(SHAPE, float(version), dtype=torch.bfloat16)


class Engine(LocalShard):
    """A shard of one worker that knows whether it serves, and can be dead.

    Attributes:
        serving: Whether it takes requests.
        stamp: What it stamps answers with.
        dead: Whether its process is gone; every call then says so.
    """

    def __init__(self, actions: Actions | None = None) -> None:
        unit = Unit("t", {"weight": (SHAPE, torch.bfloat16)})
        self.model = StandinModel([unit], {"t": [("t", copies("weight"))]}).load({"t": weights(0)})
        self.faults = Faults(actions)
        super().__init__([self.model], [self.faults])
        self.serving, self.stamp, self.dead = True, -1, False

    def _alive(self) -> None:
        if self.dead:
            raise PeerDeadError("the engine's process is gone", stage="call")

    def call(self, request: bytes) -> list[bytes]:
        self._alive()
        return super().call(request)

    def pause(self) -> None:
        self._alive()
        self.serving = False

    def resume(self) -> None:
        self._alive()
        self.serving = True

    def set_version(self, version: int) -> None:
        self._alive()
        self.stamp = version

    @property
    def value(self) -> float:
        """What all its weights are, if they are one version."""
        values = self.model.tensors()["t.weight"].unique()
        assert len(values) == 1, "mixed weights"
        return float(values)

    def state(self) -> WorkerState:
        (raw,) = super().call(encode(Status()))
        state = decode_worker_reply(raw)
        assert isinstance(state, WorkerState)
        return state


class Fleet:
    """A trainer and engines of this process."""

    def __init__(self, engines: Mapping[int, Engine]) -> None:
        self.engines = [engines[i] for i in sorted(engines)]
        self._tensor = weights(0)
        self.trainers = LocalTrainers([BoxSource({"t": whole(self._tensor)})])
        self.made: list[WeightSynchronizer] = []
        self.sync = self.connect()

    def connect(self, **options: object) -> WeightSynchronizer:
        """One more synchronizer, as a new controller would make it."""
        shards = self.engines
        made = WeightSynchronizer(
            self.trainers.infos,
            shards,
            deadline_s=DEADLINE,
            **options,  # type: ignore[arg-type]
        )
        self.made.append(made)
        return made

    def replace_trainer(self) -> None:
        """The trainer dies; another one starts from a checkpoint."""
        self.trainers.close()
        self._tensor = weights(0)
        self.trainers = LocalTrainers([BoxSource({"t": whole(self._tensor)})])

    def publish(self, version: int) -> int:
        self._tensor.copy_(weights(version))
        self.trainers.publish(version)
        return version

    def refit(self, version: int, **options: object) -> None:
        """A good refit."""
        self.sync.sync_weights(self.publish(version), **options)  # type: ignore[arg-type]

    def close(self) -> None:
        for made in self.made:
            made.shutdown()
        self.trainers.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet({i: Engine() for i in range(3)})
    yield made
    made.close()


def test_survivors_get_the_version_when_a_shard_is_lost(fleet: Fleet) -> None:
    fleet.refit(1)
    fleet.engines[2].dead = True
    report = fleet.sync.sync_weights(fleet.publish(2))
    assert (report.absent, report.workers, report.verified) == ((2,), 2, True)
    assert "gone" in report.retried
    assert [e.value for e in fleet.engines[:2]] == [2.0, 2.0]
    assert fleet.sync.shard_versions[:2] == (2, 2)
    assert not fleet.sync.is_stale


def test_two_shards_lost_at_once(fleet: Fleet) -> None:
    fleet.refit(1)
    fleet.engines[0].dead = fleet.engines[2].dead = True
    report = fleet.sync.sync_weights(fleet.publish(2))
    assert report.absent == (0, 2)
    assert (fleet.engines[1].value, fleet.engines[1].stamp) == (2.0, 2)


def test_without_retries_the_first_error_is_raised(fleet: Fleet) -> None:
    sync = fleet.connect(retry_survivors=False)
    sync.sync_weights(fleet.publish(1))
    fleet.engines[2].dead = True
    with pytest.raises(PeerDeadError, match="gone") as failed:
        sync.sync_weights(fleet.publish(2))
    assert failed.value.ranks == ("shard 2",)
    assert (failed.value.version, failed.value.epoch) == (2, 1)


def test_a_second_failure_raises_the_first_error_with_a_note(fleet: Fleet) -> None:
    fleet.refit(1)
    fleet.engines[2].dead = True
    fleet.engines[0].faults.actions["record"] = ("raise", "no memory", "always")
    with pytest.raises(PeerDeadError, match="gone") as failed:
        fleet.sync.sync_weights(fleet.publish(2))
    assert "no memory" in "".join(failed.value.__notes__)


def test_a_lost_shard_stays_out_until_it_is_asked_for_again(fleet: Fleet) -> None:
    fleet.refit(1)
    fleet.engines[2].dead = True
    fleet.refit(2)
    fleet.engines[2].dead = False
    fleet.refit(3)
    assert fleet.sync.absent == (2,)
    assert fleet.engines[2].stamp == 1
    fleet.refit(4, absent=())
    assert [e.value for e in fleet.engines] == [4.0] * 3
    assert [e.stamp for e in fleet.engines] == [4] * 3


def test_leaving_and_rejoining_are_one_operation(fleet: Fleet) -> None:
    fleet.refit(1, absent=[1])
    assert fleet.sync.membership is not None
    first = fleet.sync.membership
    assert first.shards == (0, 2)
    assert first.prefix(2) == 1
    fleet.refit(2, absent=[])
    assert fleet.sync.membership.shards == (0, 1, 2)
    assert fleet.sync.membership.epoch > first.epoch


def test_when_everybody_is_lost_the_error_says_so_and_all_are_asked_next_time(
    fleet: Fleet,
) -> None:
    fleet.refit(1)
    for engine in fleet.engines:
        engine.dead = True
    with pytest.raises(RefitError, match="gone"):
        fleet.sync.sync_weights(fleet.publish(2))
    for engine in fleet.engines:
        engine.dead = False
    fleet.refit(3)
    assert [e.value for e in fleet.engines] == [3.0] * 3


def test_no_shard_may_be_left_out_entirely(fleet: Fleet) -> None:
    with pytest.raises(NoSurvivingShardsError):
        fleet.sync.sync_weights(fleet.publish(1), absent=[0, 1, 2])


# --- what may serve -----------------------------------------------------------------------------


def test_a_shard_that_failed_in_the_middle_does_not_serve(fleet: Fleet) -> None:
    fleet.refit(1)
    fleet.engines[1].faults.actions["commit"] = ("raise", "kernel said no")
    with pytest.raises(RefitError, match="kernel said no") as failed:
        fleet.sync.sync_weights(fleet.publish(2))
    assert failed.value.ranks == ("shard 1 worker 0",)
    assert (failed.value.stage, failed.value.version, failed.value.epoch) == ("commit", 2, 1)
    assert [e.serving for e in fleet.engines] == [True, False, True]
    assert fleet.sync.shard_versions == (2, -1, 2)
    assert fleet.sync.is_stale


def test_a_stale_shard_stays_paused_when_a_later_pause_fails(fleet: Fleet) -> None:
    fleet.refit(1)
    fleet.engines[1].faults.actions["commit"] = ("raise", "kernel said no")
    with pytest.raises(RefitError, match="kernel said no"):
        fleet.sync.sync_weights(fleet.publish(2))
    usual = fleet.engines[0].pause

    def refuse() -> None:
        raise EngineStateError("it is asleep")

    fleet.engines[0].pause = refuse  # type: ignore[method-assign]
    with pytest.raises(EngineStateError, match="asleep"):
        fleet.sync.sync_weights(fleet.publish(3))
    assert [e.serving for e in fleet.engines] == [True, False, True]
    fleet.engines[0].pause = usual  # type: ignore[method-assign]
    fleet.refit(4)
    assert [e.serving for e in fleet.engines] == [True] * 3


def test_a_stale_shard_is_verified_even_if_the_caller_does_not_ask(fleet: Fleet) -> None:
    fleet.refit(1)
    fleet.engines[1].faults.actions["commit"] = ("raise", "kernel said no")
    with pytest.raises(RefitError, match="kernel said no"):
        fleet.sync.sync_weights(fleet.publish(2))
    assert fleet.sync.sync_weights(fleet.publish(3), verify=False).verified
    assert not fleet.sync.sync_weights(fleet.publish(4), verify=False).verified


def test_after_a_failure_a_new_epoch_is_built_even_if_nobody_left(fleet: Fleet) -> None:
    fleet.refit(1)
    fleet.engines[1].faults.actions["install"] = ("raise", "kernel said no")
    with pytest.raises(RefitError, match="kernel said no"):
        fleet.sync.sync_weights(fleet.publish(2))
    assert fleet.sync.membership is None
    fleet.refit(3)
    assert fleet.sync.membership is not None
    assert fleet.sync.membership.epoch == 2
    assert fleet.sync.membership.shards == (0, 1, 2)


def test_b52_a_replacement_serves_nothing_before_it_has_the_current_version(
    fleet: Fleet,
) -> None:
    fleet.refit(1)
    fleet.engines[2].dead = True
    fleet.refit(2)
    replacement = Engine()
    fleet.engines[2] = replacement
    fleet.sync.replace_shard(2, replacement)
    assert not replacement.serving
    assert fleet.sync.shard_versions[2] == -1
    fleet.refit(3)
    assert (replacement.serving, replacement.stamp, replacement.value) == (True, 3, 3.0)
    assert fleet.sync.absent == ()


def test_a_replacement_of_another_width_is_refused(fleet: Fleet) -> None:
    wide = LocalShard([fleet.engines[0].model, fleet.engines[1].model])
    with pytest.raises(ConfigError, match="2 workers"):
        fleet.sync.replace_shard(0, wide)


# --- epochs and versions ------------------------------------------------------------------------


def test_a_commit_of_a_dead_epoch_is_refused(fleet: Fleet) -> None:
    fleet.refit(1)
    plan = fleet.sync.plan
    assert plan is not None
    late = Commit(plan.membership.epoch, plan.digest, 9, True, DEADLINE, (1,))
    fleet.sync.init_communicator()
    (raw,) = fleet.engines[0].call(encode(late))
    error = to_error(decode_worker_reply(raw), "worker")  # type: ignore[arg-type]
    assert isinstance(error, StaleEpochError)
    assert fleet.engines[0].value == 1.0


def test_a_new_trainer_connects_to_running_engines(fleet: Fleet) -> None:
    fleet.refit(57)
    fleet.replace_trainer()
    fleet.sync = fleet.connect()
    fleet.refit(58)
    assert [e.value for e in fleet.engines] == [58.0] * 3


def test_b52_versions_never_go_backwards_after_a_fail_over(fleet: Fleet) -> None:
    fleet.refit(57)
    fleet.replace_trainer()
    fleet.sync = fleet.connect()
    with pytest.raises(EngineStateError, match="not newer than 57"):
        fleet.sync.sync_weights(fleet.publish(1))
    assert [e.value for e in fleet.engines] == [57.0] * 3
    assert [e.stamp for e in fleet.engines] == [57] * 3


def test_a_worker_refuses_an_older_version_itself(fleet: Fleet) -> None:
    fleet.refit(5)
    plan = fleet.sync.plan
    assert plan is not None
    older = Commit(plan.membership.epoch, plan.digest, 4, True, DEADLINE, (1,))
    (raw,) = fleet.engines[0].call(encode(older))
    error = to_error(decode_worker_reply(raw), "worker")  # type: ignore[arg-type]
    assert isinstance(error, EngineStateError)
    assert fleet.engines[0].state().version == 5


def test_a_new_controller_knows_which_shards_the_old_one_left_stale(fleet: Fleet) -> None:
    fleet.refit(1)
    fleet.engines[1].faults.actions["commit"] = ("raise", "kernel said no")
    with pytest.raises(RefitError, match="kernel said no"):
        fleet.sync.sync_weights(fleet.publish(2))
    successor = fleet.connect()
    successor.init_communicator()
    assert successor.shard_versions == (2, -1, 2)
    assert successor.sync_weights(fleet.publish(3), verify=False).verified


def test_an_overtaken_controller_is_told_so(fleet: Fleet) -> None:
    fleet.refit(1)
    successor = fleet.connect()
    successor.sync_weights(fleet.publish(2))
    with pytest.raises(StaleEpochError, match="epoch"):
        fleet.sync.sync_weights(fleet.publish(3))
    assert [e.value for e in fleet.engines] == [2.0] * 3


def test_the_end_of_an_overtaken_controller_does_not_detach_its_successor(fleet: Fleet) -> None:
    fleet.refit(1)
    successor = fleet.connect()
    successor.sync_weights(fleet.publish(2))
    fleet.sync.shutdown()
    report = successor.sync_weights(fleet.publish(3))
    assert report.retried == ""
    assert [e.value for e in fleet.engines] == [3.0] * 3


def test_a_late_send_of_an_overtaken_controller_leaves_its_successors_groups_alone(
    fleet: Fleet,
) -> None:
    overtaken = fleet.connect(transport="reshard")
    overtaken.sync_weights(fleet.publish(1))
    late = overtaken.plan
    assert late is not None
    successor = fleet.connect(transport="reshard")
    successor.sync_weights(fleet.publish(2))
    info = fleet.trainers.infos[0]
    with closing(TrainerPeer(info.rank, info.address)) as peer:
        request = SendRounds(late.membership.epoch, late.digest, 2, 0, 1, DEADLINE)
        with pytest.raises(StaleEpochError, match="Nothing was sent"):
            peer.call(request, Done, Deadline(DEADLINE), "transfer")
    report = successor.sync_weights(fleet.publish(3))
    assert report.retried == ""
    assert [e.value for e in fleet.engines] == [3.0] * 3


def test_the_end_of_an_overtaken_controllers_refit_releases_nobody(fleet: Fleet) -> None:
    fleet.refit(1)
    successor = fleet.connect()
    successor.sync_weights(fleet.publish(2))
    version = fleet.publish(3)
    with pytest.raises(StaleEpochError):
        fleet.sync.sync_weights(version)
    with pytest.raises(DeadlineError, match="waited"):
        fleet.trainers.endpoints[0].wait(version, 0.2)
    successor.sync_weights(version)
    fleet.trainers.endpoints[0].wait(version, 5)


def test_weights_are_not_read_again_after_the_trainer_was_told_that_a_refit_failed(
    fleet: Fleet,
) -> None:
    fleet.refit(1)
    for engine in fleet.engines:
        engine.faults.actions = {"install": ("raise", "injected")}
    version = fleet.publish(2)
    with pytest.raises(RefitError, match="injected"):
        fleet.sync.sync_weights(version)
    with pytest.raises(RefitError, match="may have changed its weights"):
        fleet.sync.sync_weights(version)
    fleet.sync.sync_weights(fleet.publish(3))
    assert [e.value for e in fleet.engines] == [3.0] * 3


def test_a_shard_whose_workers_hold_two_versions_does_not_generate() -> None:
    states = [WorkerState(version, False, 1, (), False) for version in (2, 1)]
    front = SimpleNamespace(states=lambda: states)
    with pytest.raises(EngineStateError, match="mixed weights"):
        LocalLLM.generate(front)  # type: ignore[arg-type]


def test_a_shard_that_pauses_too_late_goes_on(fleet: Fleet) -> None:
    fleet.refit(1)
    slow, go_on = fleet.engines[1], threading.Event()
    pause = slow.pause

    def late() -> None:
        go_on.wait(20)
        pause()

    slow.pause = late  # type: ignore[method-assign]
    with pytest.raises(DeadlineError, match="pause"):
        fleet.sync.sync_weights(fleet.publish(2), deadline_s=0.5)
    go_on.set()
    end = time.monotonic() + 5
    while not slow.serving and time.monotonic() < end:
        time.sleep(0.01)
    assert [e.serving for e in fleet.engines] == [True] * 3


def test_a_shard_that_the_caller_excluded_stays_out_when_the_others_are_lost(
    fleet: Fleet,
) -> None:
    fleet.refit(1)
    for lost in (0, 2):
        fleet.engines[lost].dead = True
    with pytest.raises(RefitError):
        fleet.sync.sync_weights(fleet.publish(2), absent=[1])
    assert fleet.sync.absent == (1,)


def test_an_absent_shard_that_does_not_exist_is_refused_and_forgotten(fleet: Fleet) -> None:
    fleet.refit(1)
    with pytest.raises(MembershipError, match="do not exist"):
        fleet.sync.sync_weights(fleet.publish(2), absent=[9])
    fleet.sync.sync_weights(fleet.publish(3))
    assert [e.value for e in fleet.engines] == [3.0] * 3


def test_leaving_the_block_shuts_a_synchronizer_down(fleet: Fleet) -> None:
    with fleet.connect() as made:
        made.sync_weights(fleet.publish(1))
    with pytest.raises(EngineStateError, match="shut down"):
        made.sync_weights(fleet.publish(2))
