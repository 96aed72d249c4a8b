"""Building a group ends in time and says who is missing, whoever is absent, dead or frozen."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
import torch
from comm_ranks import NAMES, RankProcesses, die, freeze, rank_processes

from weight_sync.comm.attendance import Attendance
from weight_sync.comm.connect import connect
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.rendezvous import Rendezvous, RendezvousHost
from weight_sync.errors import DeadlineError, MembershipError, TransportError

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    with closing(RendezvousHost("127.0.0.1", epoch=3)) as host:
        yield host.rendezvous


def connects(rank: int, world: int, where: Rendezvous, seconds: float) -> None:
    connect(where, rank, NAMES[:world], CPU, Deadline(seconds)).close()


def joins_the_store_and_dies(rank: int, world: int, where: Rendezvous) -> None:
    attendance = Attendance(where, rank, NAMES[:world], Deadline(5))
    assert attendance.rank == rank
    die()


def joins_the_store_and_freezes(rank: int, world: int, where: Rendezvous) -> None:
    attendance = Attendance(where, rank, NAMES[:world], Deadline(5))
    freeze()
    attendance.close()


def fails_after_joining(rank: int, world: int, where: Rendezvous) -> None:
    attendance = Attendance(where, rank, NAMES[:world], Deadline(5))
    attendance.leave("ran out of memory")
    attendance.close()


def hosts_the_store_and_freezes(path: str) -> None:
    host = RendezvousHost("127.0.0.1", epoch=3)
    with open(path + ".part", "wb") as file:
        file.write(msgspec.msgpack.encode(host.rendezvous))
    os.rename(path + ".part", path)
    freeze()


def test_a_missing_rank_ends_the_others_at_the_deadline_and_is_named(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for rank in (0, 2):
        ranks.start(rank, connects, rank, 3, rendezvous, 1.5)
    for outcome in (ranks.end(0), ranks.end(2)):
        assert (outcome.kind, outcome.ranks) == ("DeadlineError", ("trainer 1",))
        assert "epoch=3" in outcome.value
        assert 1.4 < outcome.seconds < 4


def test_a_rank_that_dies_while_connecting_is_named_before_the_deadline(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for rank in (0, 1):
        ranks.start(rank, connects, rank, 3, rendezvous, 15)
    ranks.start(2, joins_the_store_and_dies, 2, 3, rendezvous)
    outcomes = [ranks.end(0), ranks.end(1)]
    ranks.lose(2)
    for outcome in outcomes:
        # Whoever gives up second may see the first survivor leave, but only the dead is blamed.
        assert (outcome.kind, outcome.ranks) == ("PeerDeadError", ("shard 0 worker 0",))
        assert outcome.seconds < 10


def test_a_frozen_rank_ends_the_others_at_the_deadline_and_is_named(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    ranks.start(1, joins_the_store_and_freezes, 1, 2, rendezvous)
    ranks.start(0, connects, 0, 2, rendezvous, 1.0)
    outcome = ranks.end(0)
    ranks.lose(1)
    assert (outcome.kind, outcome.ranks) == ("DeadlineError", ("trainer 1",))
    assert outcome.seconds < 4


def test_a_rank_that_fails_while_connecting_tells_the_others_why(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    ranks.start(0, connects, 0, 2, rendezvous, 15)
    ranks.start(1, fails_after_joining, 1, 2, rendezvous)
    outcome = ranks.end(0)
    ranks.end(1)
    assert (outcome.kind, outcome.ranks) == ("AbortedError", ("trainer 1",))
    assert "ran out of memory" in outcome.value
    assert outcome.seconds < 10


def test_a_frozen_store_does_not_hold_a_rank_past_its_deadline(
    ranks: RankProcesses, tmp_path: object
) -> None:
    path = f"{tmp_path}/rendezvous"
    ranks.start(2, hosts_the_store_and_freezes, path)
    end = Deadline(10)
    while not os.path.exists(path):
        end.check("the store's address")
        time.sleep(0.02)
    os.kill(ranks.pid(2), signal.SIGSTOP)  # It may be a moment before its own stop.
    with open(path, "rb") as file:
        where = msgspec.msgpack.decode(file.read(), type=Rendezvous)
    begin = time.monotonic()
    with pytest.raises(TransportError, match="frozen"):
        connects(0, 1, where, 1.0)
    ranks.lose(2)
    assert time.monotonic() - begin < 4


def test_a_store_that_nobody_serves_ends_at_the_deadline() -> None:
    host = RendezvousHost("127.0.0.1", epoch=1)
    host.close()
    begin = time.monotonic()
    with pytest.raises(DeadlineError, match="no rendezvous store"):
        connects(0, 1, host.rendezvous, 0.3)
    assert time.monotonic() - begin < 2


def test_a_wrong_token_is_refused_at_once(rendezvous: Rendezvous) -> None:
    stale = msgspec.structs.replace(rendezvous, token="0" * 32)
    with pytest.raises(TransportError, match="token"):
        connects(0, 1, stale, 10)


def test_a_rank_without_a_name_is_refused(rendezvous: Rendezvous) -> None:
    with pytest.raises(MembershipError, match="rank order"):
        Attendance(rendezvous, 2, NAMES[:2], Deadline(5))


def test_the_token_is_not_shown_by_repr(rendezvous: Rendezvous) -> None:
    assert rendezvous.token not in repr(rendezvous)


def test_each_rendezvous_has_a_port_and_a_secret_of_its_own() -> None:
    hosts = [RendezvousHost("127.0.0.1", epoch=n) for n in range(2)]
    first, second = (host.rendezvous for host in hosts)
    for host in hosts:
        host.close()
    assert first.port != second.port
    assert first.token != second.token


def test_an_address_that_cannot_be_bound_is_a_named_error() -> None:
    with pytest.raises(TransportError, match="give an address of this host"):
        RendezvousHost("192.0.2.1", epoch=1)
