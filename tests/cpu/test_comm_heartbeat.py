"""A frozen participant is found by its silence."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import closing

import pytest
from comm_ranks import NAMES, RankProcesses, rank_processes

from weight_sync.comm.deadline import Deadline
from weight_sync.comm.heartbeat import HeartbeatBoard, HeartbeatPublisher
from weight_sync.comm.rendezvous import Rendezvous, RendezvousHost
from weight_sync.comm.store_client import StoreClient
from weight_sync.comm.store_heartbeat import StoreHeartbeat, read_heartbeats


def test_who_was_never_heard_of_is_silent_after_the_limit() -> None:
    board = HeartbeatBoard(["b", "a"], now=10.0)
    assert board.silent(now=12.0, limit=2.0) == []
    assert board.silent(now=12.1, limit=2.0) == ["a", "b"]


def test_a_new_beat_ends_the_silence() -> None:
    board = HeartbeatBoard(["a", "b"], now=0.0)
    board.record("a", 0, now=5.0)
    assert board.silent(now=6.0, limit=2.0) == ["b"]


def test_an_old_beat_read_again_does_not_end_the_silence() -> None:
    board = HeartbeatBoard(["a"], now=0.0)
    board.record("a", 3, now=1.0)
    board.record("a", 3, now=5.0)
    board.record("a", 2, now=5.0)
    assert board.silent(now=5.0, limit=2.0) == ["a"]


def test_beats_of_strangers_are_ignored() -> None:
    board = HeartbeatBoard(["a"], now=0.0)
    board.record("z", 1, now=1.0)
    assert board.silent(now=9.0, limit=2.0) == ["a"]


def test_a_publisher_counts_up_until_it_is_closed() -> None:
    counts: list[int] = []
    three = threading.Event()

    def publish(count: int) -> None:
        counts.append(count)
        if len(counts) == 3:
            three.set()

    with closing(HeartbeatPublisher(publish, interval=0.01)):
        assert three.wait(5)
    after = len(counts)
    time.sleep(0.05)
    assert counts == list(range(after))


def test_a_failed_beat_is_logged_once_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    counts: list[int] = []
    healed = threading.Event()

    def publish(count: int) -> None:
        if count < 3:
            raise OSError("no route")
        counts.append(count)
        healed.set()

    with closing(HeartbeatPublisher(publish, interval=0.01)):
        assert healed.wait(5)
    assert [record.getMessage() for record in caplog.records] == [
        "a heartbeat could not be published: no route"
    ]


def beats(where: Rendezvous, name: str, seconds: float) -> None:
    with closing(StoreHeartbeat(where, name, 0.05, Deadline(5))):
        time.sleep(seconds)


def silent_within(host: RendezvousHost, limit: float, ranks: RankProcesses) -> list[str]:
    where = host.rendezvous
    for rank in range(3):
        ranks.start(rank, beats, where, NAMES[rank], 30.0)
    with closing(StoreClient(where.host, where.port, where.token, Deadline(5))) as client:
        board = HeartbeatBoard(NAMES, time.monotonic())
        keys = [where.key("beat", name) for name in NAMES]
        assert len(client.wait(keys, Deadline(5))) == 3, "not every participant has begun"
        os.kill(ranks.pid(1), signal.SIGSTOP)
        end = Deadline(3 * limit)
        while not end.expired:
            read_heartbeats(client, where, NAMES, board, time.monotonic(), Deadline(5))
            time.sleep(0.1)
        return board.silent(time.monotonic(), limit)


def test_a_stopped_process_is_the_only_silent_one() -> None:
    with closing(RendezvousHost("127.0.0.1", epoch=1)) as host, rank_processes() as ranks:
        assert silent_within(host, 1.0, ranks) == ["trainer 1"]


def test_a_closed_store_heartbeat_leaves_no_thread() -> None:
    with closing(RendezvousHost("127.0.0.1", epoch=1)) as host:
        heartbeat = StoreHeartbeat(host.rendezvous, "a", 0.05, Deadline(5))
        heartbeat.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
