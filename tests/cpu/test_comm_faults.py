"""A group in use that loses a rank ends in time, on every survivor, and names who was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from comm_ranks import NAMES, Outcome, RankProcesses, die, freeze, rank_processes, wait_for_death

from weight_sync.comm.base import Communicator
from weight_sync.comm.connect import connect
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.rendezvous import Rendezvous, RendezvousHost
from weight_sync.comm.watchdog import Watchdog
from weight_sync.errors import AbortedError

WORKER = "shard 0 worker 0"
BIG = 64 << 20  # Far more than the sockets on the way can hold.
MANY = 32  # So many of them take much longer than the call that stops a process.


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    with closing(RendezvousHost("127.0.0.1", epoch=5)) as host:
        yield host.rendezvous


def build(rank: int, world: int, where: Rendezvous) -> Communicator:
    return connect(where, rank, NAMES[:world], torch.device("cpu"), Deadline(15))


def receives_from_worker(rank: int, world: int, where: Rendezvous, seconds: float) -> None:
    with closing(build(rank, world, where)) as comm:
        comm.recv(torch.empty(1 << 20, dtype=torch.uint8), 2)
        comm.synchronize(Deadline(seconds), version=7)


def sends_to_worker(rank: int, world: int, where: Rendezvous, seconds: float) -> None:
    with closing(build(rank, world, where)) as comm:
        comm.send(torch.zeros(BIG, dtype=torch.uint8), 2)
        comm.synchronize(Deadline(seconds), version=7)


def broadcasts(rank: int, world: int, where: Rendezvous, root: int, seconds: float) -> None:
    with closing(build(rank, world, where)) as comm:
        comm.broadcast(torch.zeros(BIG, dtype=torch.uint8), root)
        comm.synchronize(Deadline(seconds), version=7)


def receives_late_from_worker(
    rank: int, world: int, where: Rendezvous, seconds: float, worker: int
) -> None:
    with closing(build(rank, world, where)) as comm:
        wait_for_death(worker)
        comm.recv(torch.empty(BIG, dtype=torch.uint8), 2)
        comm.synchronize(Deadline(seconds), version=7)


def sends_what_the_sockets_hold_and_dies(rank: int, world: int, where: Rendezvous) -> None:
    comm = build(rank, world, where)
    for peer in (0, 1):
        comm.send(torch.zeros(BIG, dtype=torch.uint8), peer)
    time.sleep(0.2)
    die()


def connects_and_dies(rank: int, world: int, where: Rendezvous, pause: float = 0.2) -> None:
    comm = build(rank, world, where)
    time.sleep(pause)
    assert comm.aborted is None
    die()


def connects_and_freezes(rank: int, world: int, where: Rendezvous) -> None:
    comm = build(rank, world, where)
    time.sleep(0.2)
    assert comm.aborted is None
    freeze()


def aborts_after_a_moment(rank: int, world: int, where: Rendezvous, reason: str) -> None:
    with closing(build(rank, world, where)) as comm:
        time.sleep(0.3)
        comm.abort(reason)
        comm.abort("a second reason")
        assert comm.aborted == reason


def is_aborted_from_another_thread(rank: int, world: int, where: Rendezvous) -> float:
    with closing(build(rank, world, where)) as comm:
        comm.recv(torch.empty(1 << 20, dtype=torch.uint8), 1 - rank)
        times = []

        def abort() -> None:
            times.append(time.monotonic())
            comm.abort("the operator said so")

        timer = threading.Timer(0.3, abort)
        timer.start()
        with pytest.raises(AbortedError, match="the operator said so"):
            comm.synchronize(Deadline(15))
        timer.join()
        return time.monotonic() - times[0]


def is_aborted_within_a_buffer(rank: int, world: int, where: Rendezvous) -> float:
    with closing(build(rank, world, where)) as comm:
        buf = torch.empty(BIG, dtype=torch.uint8)
        for _ in range(MANY):
            comm.recv(buf, 2)
        timer = threading.Timer(0.5, comm.abort, ["the operator said so"])
        timer.start()
        begin = time.monotonic()
        with pytest.raises(AbortedError, match="the operator said so"):
            comm.synchronize(Deadline(15))
        timer.join()
        return time.monotonic() - begin


def freezes_within_a_send(rank: int, world: int, where: Rendezvous) -> None:
    with closing(build(rank, world, where)) as comm:
        buf = torch.zeros(BIG, dtype=torch.uint8)
        for _ in range(MANY):
            comm.send(buf, 0)
            comm.send(buf, 1)
        freeze()


def is_aborted_while_meeting(rank: int, world: int, where: Rendezvous) -> float:
    with closing(build(rank, world, where)) as comm:
        timer = threading.Timer(0.3, comm.abort, ["the operator said so"])
        timer.start()
        begin = time.monotonic()
        with pytest.raises(AbortedError, match="the operator said so"):
            comm.meet("never", Deadline(15))
        timer.join()
        return time.monotonic() - begin


def stays_away_from_the_meeting(rank: int, world: int, where: Rendezvous) -> None:
    with closing(build(rank, world, where)):
        time.sleep(2.0)


def meets(rank: int, world: int, where: Rendezvous, seconds: float) -> None:
    with closing(build(rank, world, where)) as comm:
        comm.meet("drained", Deadline(seconds))


def raises_in_a_group(rank: int, world: int, where: Rendezvous) -> str | None:
    def send_part() -> None:
        with comm.group():
            comm.send(torch.zeros(4, dtype=torch.uint8), 1 - rank)
            raise ZeroDivisionError("bucket 3")

    with closing(build(rank, world, where)) as comm:
        with pytest.raises(ZeroDivisionError):
            send_part()
        return comm.aborted


def is_released_by_the_watchdog(rank: int, world: int, where: Rendezvous) -> float:
    watchdog = Watchdog()

    def receive() -> None:
        with watchdog.guard([comm], Deadline(0.3), "transfer"):
            comm.recv(torch.empty(1 << 20, dtype=torch.uint8), 1 - rank)
            comm.synchronize(Deadline(15))

    with closing(build(rank, world, where)) as comm:
        begin = time.monotonic()
        with pytest.raises(AbortedError, match="transfer took longer"):
            receive()
        return time.monotonic() - begin


def launches_after_an_abort(rank: int, world: int, where: Rendezvous) -> None:
    with closing(build(rank, world, where)) as comm:
        comm.abort("over")
        comm.send(torch.zeros(4, dtype=torch.uint8), 1 - rank)


def aborts_then_rebuilds(rank: int, world: int, first: Rendezvous, second: Rendezvous) -> bool:
    old = build(rank, world, first)
    old.recv(torch.empty(8, dtype=torch.uint8), 1 - rank)
    old.abort("a rebuild is due")
    with closing(build(rank, world, second)) as comm:
        old.close()
        assert comm.epoch == old.epoch + 1
        got = torch.zeros(8, dtype=torch.uint8)
        comm.send(torch.full((8,), rank + 1, dtype=torch.uint8), 1 - rank)
        comm.recv(got, 1 - rank)
        comm.synchronize(Deadline(10))
        comm.meet("done", Deadline(10))
        return bool((got == 2 - rank).all())


def survivors(ranks: RankProcesses) -> list[Outcome]:
    outcomes = [ranks.end(0), ranks.end(1)]
    ranks.lose(2)
    return outcomes


def test_a_rank_killed_while_others_receive_from_it_is_named_on_every_survivor(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for rank in (0, 1):
        ranks.start(rank, receives_from_worker, rank, 3, rendezvous, 12)
    ranks.start(2, connects_and_dies, 2, 3, rendezvous)
    for outcome in survivors(ranks):
        assert (outcome.kind, outcome.ranks) == ("PeerDeadError", (WORKER,))
        assert "version=7, epoch=5" in outcome.value
        assert outcome.seconds < 10


def test_a_rank_killed_in_the_middle_of_a_send_is_named_on_every_survivor(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for rank in (0, 1):
        ranks.start(rank, receives_late_from_worker, rank, 3, rendezvous, 12, ranks.pid(2))
    ranks.start(2, sends_what_the_sockets_hold_and_dies, 2, 3, rendezvous)
    for outcome in survivors(ranks):
        assert (outcome.kind, outcome.ranks) == ("PeerDeadError", (WORKER,))


def test_a_rank_killed_while_others_send_to_it_is_named_on_every_survivor(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for rank in (0, 1):
        ranks.start(rank, sends_to_worker, rank, 3, rendezvous, 12)
    ranks.start(2, connects_and_dies, 2, 3, rendezvous)
    for outcome in survivors(ranks):
        assert (outcome.kind, outcome.ranks) == ("PeerDeadError", (WORKER,))


def test_a_root_killed_during_its_broadcast_is_named_on_every_survivor(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for rank in (0, 1):
        ranks.start(rank, broadcasts, rank, 3, rendezvous, 2, 12)
    ranks.start(2, connects_and_dies, 2, 3, rendezvous)
    outcomes = survivors(ranks)
    assert [(o.kind, o.ranks) for o in outcomes] == [("PeerDeadError", (WORKER,))] * 2


@pytest.mark.parametrize("pause", [0.0, 0.01, 0.02, 0.04, 0.08])
def test_a_receiver_killed_during_a_broadcast_is_named_by_the_root_and_strands_nobody(
    ranks: RankProcesses, rendezvous: Rendezvous, pause: float
) -> None:
    for rank in (0, 1):
        ranks.start(rank, broadcasts, rank, 3, rendezvous, 0, 12)
    ranks.start(2, connects_and_dies, 2, 3, rendezvous, pause)
    root, other = survivors(ranks)
    assert (root.kind, root.ranks) == ("PeerDeadError", (WORKER,))
    # The other receiver may have all its bytes by then; if not, it blames the same rank.
    assert (other.kind, other.ranks) in {("ok", ()), ("PeerDeadError", (WORKER,))}
    assert other.seconds < 6


@pytest.mark.parametrize("body", [receives_from_worker, sends_to_worker])
def test_a_frozen_rank_ends_its_peers_at_the_deadline_and_is_named(
    ranks: RankProcesses, rendezvous: Rendezvous, body: object
) -> None:
    for rank in (0, 1):
        ranks.start(rank, body, rank, 3, rendezvous, 1.0)
    ranks.start(2, connects_and_freezes, 2, 3, rendezvous)
    for outcome in survivors(ranks):
        assert (outcome.kind, outcome.ranks) == ("DeadlineError", (WORKER,))
        assert outcome.seconds < 6


def test_a_frozen_rank_in_a_broadcast_is_told_from_those_that_wait_with_us(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for rank in (0, 1):
        ranks.start(rank, broadcasts, rank, 3, rendezvous, 2, 1.0)
    ranks.start(2, connects_and_freezes, 2, 3, rendezvous)
    for outcome in survivors(ranks):
        assert (outcome.kind, outcome.ranks) == ("DeadlineError", (WORKER,))


def test_an_abort_from_another_thread_releases_a_receive_at_once(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for outcome in ranks.run(2, is_aborted_from_another_thread, rendezvous):
        assert outcome.kind == "ok"
        assert outcome.value < 2


def test_an_abort_releases_a_receive_that_has_begun_to_fill_its_buffer(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for rank in (0, 1):
        ranks.start(rank, is_aborted_within_a_buffer, rank, 3, rendezvous)
    ranks.start(2, freezes_within_a_send, 2, 3, rendezvous)
    for outcome in survivors(ranks):
        assert outcome.kind == "ok", outcome
        assert outcome.value < 2


def test_an_abort_from_another_thread_releases_a_meeting(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    ranks.start(0, is_aborted_while_meeting, 0, 2, rendezvous)
    ranks.start(1, stays_away_from_the_meeting, 1, 2, rendezvous)
    outcome = ranks.end(0)
    assert (outcome.kind, ranks.end(1).kind) == ("ok", "ok")
    assert outcome.value < 1.5


def test_the_peers_of_an_aborted_group_learn_who_gave_up_and_why(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for rank in (0, 1):
        ranks.start(rank, receives_from_worker, rank, 3, rendezvous, 12)
    ranks.start(2, aborts_after_a_moment, 2, 3, rendezvous, "packing failed")
    assert ranks.end(2).kind == "ok"
    for outcome in (ranks.end(0), ranks.end(1)):
        assert outcome.kind == "AbortedError"
        assert "packing failed" in outcome.value
        assert outcome.seconds < 10


def test_ranks_that_do_not_come_to_a_meeting_are_named(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    ranks.start(0, meets, 0, 2, rendezvous, 0.5)
    ranks.start(1, stays_away_from_the_meeting, 1, 2, rendezvous)
    outcome = ranks.end(0)
    ranks.end(1)
    assert (outcome.kind, outcome.ranks) == ("DeadlineError", ("trainer 1",))
    assert "stage=drained" in outcome.value


def test_an_exception_inside_a_group_aborts_it(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for outcome in ranks.run(2, raises_in_a_group, rendezvous):
        assert outcome.kind == "ok"
        assert "bucket 3" in outcome.value


def test_the_watchdog_releases_a_receive_that_takes_too_long(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for outcome in ranks.run(2, is_released_by_the_watchdog, rendezvous):
        assert outcome.kind == "ok", outcome
        assert outcome.value < 3


def test_an_aborted_group_refuses_new_work(ranks: RankProcesses, rendezvous: Rendezvous) -> None:
    for outcome in ranks.run(2, launches_after_an_abort, rendezvous):
        assert outcome.kind == "AbortedError"


def test_a_group_rebuilt_after_an_abort_moves_bytes(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    with closing(RendezvousHost("127.0.0.1", epoch=6)) as fresh:
        outcomes = ranks.run(2, aborts_then_rebuilds, rendezvous, fresh.rendezvous)
    assert [(o.kind, o.value) for o in outcomes] == [("ok", True)] * 2
