"""NCCL groups of two real processes on two GPUs: bytes, streams, faults, settings, rebuilds."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

from comm_ranks import NAMES, RankProcesses, die, freeze, rank_processes

from weight_sync.comm.base import Communicator
from weight_sync.comm.connect import connect
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.rendezvous import Rendezvous, RendezvousHost
from weight_sync.comm.watchdog import Watchdog
from weight_sync.errors import AbortedError

pytestmark = [
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(180),
]

SIZES = (0, 1, 4097, 0, 64 << 20)
PEER = "trainer 1"
_kept: list[Communicator] = []


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes(patience=90) as processes:
        yield processes


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    with closing(RendezvousHost("127.0.0.1", epoch=5)) as host:
        yield host.rendezvous


def build(rank: int, where: Rendezvous, seconds: float = 60) -> Communicator:
    return connect(where, rank, NAMES[:2], torch.device("cuda", rank), Deadline(seconds))


def random_bytes(size: int, seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + size % 997)
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    return data.to(device)


def empty(size: int, comm: Communicator) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=comm.device)


def sends_both_ways(rank: int, world: int, where: Rendezvous) -> int:
    with closing(build(rank, where)) as comm:
        torch.cuda.set_device(comm.device)
        sent = [random_bytes(size, rank, comm.device) for size in SIZES]
        got = [empty(size, comm) for size in SIZES]
        comm.wait_stream(torch.cuda.current_stream())
        with comm.group():
            for one, other in zip(sent, got, strict=True):
                comm.send(one, 1 - rank)
                comm.recv(other, 1 - rank)
        comm.synchronize(Deadline(20))
        comm.meet("done", Deadline(20))
        return sum(
            not torch.equal(buf, random_bytes(size, 1 - rank, comm.device))
            for buf, size in zip(got, SIZES, strict=True)
        )


def broadcasts_from_both(rank: int, world: int, where: Rendezvous) -> int:
    with closing(build(rank, where)) as comm:
        torch.cuda.set_device(comm.device)
        wrong = 0
        for root in (0, 1):
            for size in SIZES:
                expected = random_bytes(size, root, comm.device)
                buf = expected.clone() if rank == root else empty(size, comm)
                comm.wait_stream(torch.cuda.current_stream())
                comm.broadcast(buf, root)
                comm.synchronize(Deadline(20))
                wrong += not torch.equal(buf, expected)
        comm.meet("done", Deadline(20))
        return wrong


def nests_groups_of_two_communicators(rank: int, world: int, where: Rendezvous) -> int:
    with (
        closing(build(rank, where.group("stage0"))) as one,
        closing(build(rank, where.group("stage1"))) as two,
    ):
        torch.cuda.set_device(one.device)
        size = 8 << 20
        mine = random_bytes(size, rank, one.device)
        got = [empty(size, one), empty(size, two)]
        for comm in (one, two):
            comm.wait_stream(torch.cuda.current_stream())
        with one.group(), two.group():
            for comm, buf in zip((one, two), got, strict=True):
                comm.send(mine, 1 - rank)
                comm.recv(buf, 1 - rank)
        for comm in (one, two):
            comm.synchronize(Deadline(20))
        one.meet("done", Deadline(20))
        expected = random_bytes(size, 1 - rank, one.device)
        return sum(not torch.equal(buf, expected) for buf in got)


def orders_streams_without_blocking(rank: int, world: int, where: Rendezvous) -> bool:
    with closing(build(rank, where)) as comm:
        torch.cuda.set_device(comm.device)
        stream = torch.cuda.Stream()
        buf, copy = empty(1 << 20, comm), empty(1 << 20, comm)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            if rank == 0:
                torch.cuda._sleep(200_000_000)  # Cycles: the value comes long after the call.
                buf.fill_(7)
                comm.wait_stream(stream)
                comm.send(buf, 1)
            else:
                comm.recv(buf, 0)
                comm.release_stream(stream, Deadline(20))
                copy.copy_(buf)
        comm.synchronize(Deadline(20))
        stream.synchronize()
        comm.meet("done", Deadline(20))
        return rank == 0 or bool((copy == 7).all())


def warms_up_then_receives(rank: int, world: int, where: Rendezvous, seconds: float) -> None:
    with closing(build(rank, where)) as comm:
        exchange(comm)
        comm.recv(empty(1 << 20, comm), 1 - rank)
        comm.synchronize(Deadline(seconds), version=7)


def warms_up_then_dies(rank: int, world: int, where: Rendezvous) -> None:
    comm = build(rank, where)
    exchange(comm)
    time.sleep(0.3)
    die()


def warms_up_then_freezes(rank: int, world: int, where: Rendezvous) -> None:
    comm = build(rank, where)
    exchange(comm)
    time.sleep(0.3)
    freeze()
    comm.close()


def warms_up_then_gives_up(rank: int, world: int, where: Rendezvous) -> None:
    with closing(build(rank, where)) as comm:
        exchange(comm)
        time.sleep(0.3)
        comm.abort("packing failed")


def exchange(comm: Communicator) -> None:
    """Both directions once, so NCCL has connected the pair."""
    with comm.group():
        comm.send(empty(1024, comm), 1 - comm.rank)
        comm.recv(empty(1024, comm), 1 - comm.rank)
    comm.synchronize(Deadline(30))
    comm.meet("warm", Deadline(30))


def is_aborted_from_another_thread(rank: int, world: int, where: Rendezvous) -> float:
    with closing(build(rank, where)) as comm:
        exchange(comm)
        comm.recv(empty(1 << 20, comm), 1 - rank)
        times: list[float] = []

        def abort() -> None:
            times.append(time.monotonic())
            comm.abort("the operator said so")

        timer = threading.Timer(0.3, abort)
        timer.start()
        with pytest.raises(AbortedError, match="the operator said so"):
            comm.synchronize(Deadline(20))
        waited = time.monotonic() - times[0]
        timer.join()
        torch.cuda.synchronize(comm.device)  # The stuck kernel has ended.
        return waited


def is_released_by_the_watchdog(rank: int, world: int, where: Rendezvous) -> float:
    watchdog = Watchdog()

    def receive() -> None:
        with watchdog.guard([comm], Deadline(0.5), "transfer"):
            comm.recv(empty(1 << 20, comm), 1 - rank)
            comm.synchronize(Deadline(20))

    with closing(build(rank, where)) as comm:
        exchange(comm)
        begin = time.monotonic()
        with pytest.raises(AbortedError, match="transfer took longer"):
            receive()
        return time.monotonic() - begin


def raises_in_a_group(rank: int, world: int, where: Rendezvous) -> str | None:
    def send_part() -> None:
        with comm.group():
            comm.send(empty(4, comm), 1 - rank)
            raise ZeroDivisionError("bucket 3")

    with closing(build(rank, where)) as comm:
        exchange(comm)
        with pytest.raises(ZeroDivisionError):
            send_part()
        return comm.aborted


def connects_on(rank: int, world: int, where: Rendezvous, device: int, seconds: float) -> None:
    connect(where, rank, NAMES[:2], torch.device("cuda", device), Deadline(seconds)).close()


def exchanges_with_settings(
    rank: int, world: int, where: Rendezvous, settings: list[dict[str, str]]
) -> int:
    os.environ.update(settings[rank])
    return sends_both_ways(rank, world, where)


def rebuild(rank: int, world: int, where: Rendezvous) -> tuple[float, int, int, int]:
    """Aborts the group with a receive in flight; seconds, descriptors, threads, free GPU bytes."""
    begin = time.monotonic()
    for old in _kept:
        old.abort("a rebuild is due")
    comm = build(rank, where)
    for old in _kept:
        old.close()
    _kept[:] = [comm]
    exchange(comm)
    seconds = time.monotonic() - begin
    comm.recv(empty(1 << 20, comm), 1 - rank)
    free, _ = torch.cuda.mem_get_info(comm.device)
    return seconds, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), free


@pytest.mark.parametrize(
    "body", [sends_both_ways, broadcasts_from_both, nests_groups_of_two_communicators]
)
def test_bytes_arrive_unchanged(ranks: RankProcesses, rendezvous: Rendezvous, body: object) -> None:
    outcomes = ranks.run(2, body, rendezvous)
    assert [(o.kind, o.value) for o in outcomes] == [("ok", 0)] * 2


def test_transfers_are_ordered_with_streams(ranks: RankProcesses, rendezvous: Rendezvous) -> None:
    outcomes = ranks.run(2, orders_streams_without_blocking, rendezvous)
    assert [(o.kind, o.value) for o in outcomes] == [("ok", True)] * 2


def test_a_missing_rank_ends_the_other_at_the_deadline_and_is_named(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    ranks.start(0, connects_on, 0, 2, rendezvous, 0, 5.0)
    outcome = ranks.end(0)
    assert (outcome.kind, outcome.ranks) == ("DeadlineError", (PEER,))
    assert outcome.seconds < 12


def test_a_killed_peer_is_named_before_the_deadline(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    ranks.start(0, warms_up_then_receives, 0, 2, rendezvous, 60)
    ranks.start(1, warms_up_then_dies, 1, 2, rendezvous)
    outcome = ranks.end(0)
    ranks.lose(1)
    assert (outcome.kind, outcome.ranks) == ("PeerDeadError", (PEER,))
    assert "version=7, epoch=5" in outcome.value


def test_a_frozen_peer_ends_the_wait_at_the_deadline_and_is_named(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    ranks.start(0, warms_up_then_receives, 0, 2, rendezvous, 2)
    ranks.start(1, warms_up_then_freezes, 1, 2, rendezvous)
    outcome = ranks.end(0)
    ranks.lose(1)
    assert (outcome.kind, outcome.ranks) == ("DeadlineError", (PEER,))


def test_the_peer_of_an_aborted_group_learns_why(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    ranks.start(0, warms_up_then_receives, 0, 2, rendezvous, 60)
    ranks.start(1, warms_up_then_gives_up, 1, 2, rendezvous)
    outcome = ranks.end(0)
    assert ranks.end(1).kind == "ok"
    assert (outcome.kind, outcome.ranks) == ("AbortedError", (PEER,))
    assert "packing failed" in outcome.value


@pytest.mark.parametrize("body", [is_aborted_from_another_thread, is_released_by_the_watchdog])
def test_an_abort_releases_a_stuck_receive(
    ranks: RankProcesses, rendezvous: Rendezvous, body: object
) -> None:
    for outcome in ranks.run(2, body, rendezvous):
        assert outcome.kind == "ok", outcome
        assert outcome.value < 3


def test_an_exception_inside_a_group_aborts_it(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for outcome in ranks.run(2, raises_in_a_group, rendezvous):
        assert outcome.kind == "ok", outcome
        assert "bucket 3" in outcome.value


def test_two_ranks_on_one_gpu_are_refused_at_once(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for outcome in ranks.run(2, connects_on, rendezvous, 0, 60.0):
        assert outcome.kind == "EnvironmentUnsupportedError"
        assert "use the same GPU" in outcome.value
        assert outcome.seconds < 5


@pytest.mark.parametrize(
    "setting", [{"NCCL_CUMEM_ENABLE": "0"}, {"NCCL_CUMEM_ENABLE": "1"}, {"NCCL_P2P_DISABLE": "1"}]
)
def test_ranks_that_agree_on_a_setting_move_the_right_bytes(
    rendezvous: Rendezvous, setting: dict[str, str]
) -> None:
    with rank_processes(patience=90) as fresh:  # NCCL reads its settings once in a process.
        outcomes = fresh.run(2, exchanges_with_settings, rendezvous, [setting, setting])
    assert [(o.kind, o.value) for o in outcomes] == [("ok", 0)] * 2


@pytest.mark.parametrize("values", [("0", "1"), ("1", "0")])
def test_ranks_that_differ_in_cumem_are_refused_at_once(
    rendezvous: Rendezvous, values: tuple[str, str]
) -> None:
    settings = [{"NCCL_CUMEM_ENABLE": value} for value in values]
    with rank_processes(patience=90) as fresh:
        outcomes = fresh.run(2, exchanges_with_settings, rendezvous, settings)
    for outcome in outcomes:
        assert outcome.kind == "EnvironmentUnsupportedError"
        assert "differ in NCCL_CUMEM_ENABLE" in outcome.value


def test_twenty_rebuilds_are_fast_and_leave_nothing_behind(ranks: RankProcesses) -> None:
    seen = []
    for epoch in range(23):
        with closing(RendezvousHost("127.0.0.1", epoch)) as host:
            outcomes = ranks.run(2, rebuild, host.rendezvous)
        assert [outcome.kind for outcome in outcomes] == ["ok", "ok"], outcomes
        seen.append([outcome.value for outcome in outcomes])
    for before, after in zip(seen[2], seen[-1], strict=True):
        assert after[1] <= before[1], "descriptors"
        assert after[2] <= before[2], "threads"
        assert after[3] >= before[3] - (16 << 20), "GPU memory"
    assert max(value[0] for values in seen[3:] for value in values) < 3.0
