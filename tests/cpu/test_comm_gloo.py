"""Bytes arrive unchanged through gloo groups of two and three real processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from comm_ranks import NAMES, RankProcesses, rank_processes

from weight_sync.comm.connect import connect
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.rendezvous import Rendezvous, RendezvousHost
from weight_sync.errors import TransportError

SIZES = (0, 1, 4097, 0, 3 << 20)


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes() as processes:
        yield processes


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    with closing(RendezvousHost("127.0.0.1", epoch=1)) as host:
        yield host.rendezvous


def random_bytes(size: int, *seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hash((size, *seed)) % (1 << 31))
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def sends_to_everyone(rank: int, world: int, where: Rendezvous) -> int:
    with closing(connect(where, rank, NAMES[:world], torch.device("cpu"), Deadline(10))) as comm:
        received = []
        with comm.group():
            for peer in range(world):
                for size in SIZES if peer != rank else ():
                    comm.send(random_bytes(size, rank, peer), peer)
                    received.append((torch.zeros(size, dtype=torch.uint8), size, peer))
                    comm.recv(received[-1][0], peer)
        comm.synchronize(Deadline(10))
        comm.meet("done", Deadline(10))
        return sum(not torch.equal(buf, random_bytes(n, p, rank)) for buf, n, p in received)


def broadcasts_from_everyone(rank: int, world: int, where: Rendezvous) -> int:
    with closing(connect(where, rank, NAMES[:world], torch.device("cpu"), Deadline(10))) as comm:
        bufs = []
        for root in range(world):
            for size in SIZES:
                mine = random_bytes(size, root) if rank == root else torch.zeros(size).byte()
                comm.broadcast(mine, root)
                bufs.append((mine, size, root))
        comm.synchronize(Deadline(10))
        comm.meet("done", Deadline(10))
        return sum(not torch.equal(buf, random_bytes(size, root)) for buf, size, root in bufs)


def sends_large_both_ways(rank: int, world: int, where: Rendezvous) -> bool:
    with closing(connect(where, rank, NAMES[:world], torch.device("cpu"), Deadline(10))) as comm:
        size, peer = 16 << 20, 1 - rank  # More than any socket buffer holds.
        got = torch.zeros(size, dtype=torch.uint8)
        with comm.group():
            comm.send(random_bytes(size, rank), peer)
            comm.recv(got, peer)
        comm.synchronize(Deadline(15))
        comm.meet("done", Deadline(10))
        return torch.equal(got, random_bytes(size, peer))


def refused_buffers(rank: int, world: int, where: Rendezvous) -> list[str]:
    with closing(connect(where, rank, NAMES[:world], torch.device("cpu"), Deadline(10))) as comm:
        messages = []
        for buf, peer in (
            (torch.zeros(4), 1 - rank),
            (torch.zeros(2, 2, dtype=torch.uint8), 1 - rank),
            (torch.zeros(8, dtype=torch.uint8)[::2], 1 - rank),
            (torch.zeros(4, dtype=torch.uint8), rank),
            (torch.zeros(4, dtype=torch.uint8), world),
        ):
            with pytest.raises(TransportError) as refused:
                comm.send(buf, peer)
            messages.append(str(refused.value))
        comm.synchronize(Deadline(5))
        comm.meet("done", Deadline(10))
        return messages


@pytest.mark.parametrize("world", [2, 3])
def test_every_pair_exchanges_random_bytes_and_empty_buffers(
    ranks: RankProcesses, rendezvous: Rendezvous, world: int
) -> None:
    outcomes = ranks.run(world, sends_to_everyone, rendezvous)
    assert [(o.kind, o.value) for o in outcomes] == [("ok", 0)] * world


@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_broadcasts_random_bytes_and_empty_buffers(
    ranks: RankProcesses, rendezvous: Rendezvous, world: int
) -> None:
    outcomes = ranks.run(world, broadcasts_from_everyone, rendezvous)
    assert [(o.kind, o.value) for o in outcomes] == [("ok", 0)] * world


def test_grouped_large_sends_in_both_directions_do_not_block_each_other(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    outcomes = ranks.run(2, sends_large_both_ways, rendezvous)
    assert [(o.kind, o.value) for o in outcomes] == [("ok", True)] * 2


def test_buffers_and_peers_that_cannot_be_sent_are_refused_and_leave_the_group_good(
    ranks: RankProcesses, rendezvous: Rendezvous
) -> None:
    for outcome in ranks.run(2, refused_buffers, rendezvous):
        assert outcome.kind == "ok"
        assert all("uint8" in message for message in outcome.value[:3])
        assert all("membership" in message for message in outcome.value[3:])


def test_two_groups_share_one_rendezvous(ranks: RankProcesses, rendezvous: Rendezvous) -> None:
    for name in ("stage0", "stage1"):
        outcomes = ranks.run(2, sends_to_everyone, rendezvous.group(name))
        assert [(o.kind, o.value) for o in outcomes] == [("ok", 0)] * 2


def test_a_group_of_one_rank_synchronizes(ranks: RankProcesses, rendezvous: Rendezvous) -> None:
    (outcome,) = ranks.run(1, broadcasts_from_everyone, rendezvous)
    assert (outcome.kind, outcome.value) == ("ok", 0)
