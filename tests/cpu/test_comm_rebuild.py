"""Groups may be rebuilt again and again: nothing of the old ones stays behind."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing
from typing import NamedTuple

import psutil
import torch
from comm_ranks import NAMES, rank_processes

from weight_sync.comm.base import Communicator
from weight_sync.comm.connect import connect
from weight_sync.comm.deadline import Deadline
from weight_sync.comm.rendezvous import Rendezvous, RendezvousHost

WARM_UP = 3
REBUILDS = 20
#: More than the allocator's noise, less than one leaked megabyte buffer per rebuild.
MEMORY_SLACK = 8 << 20

_kept: list[Communicator] = []


class Held(NamedTuple):
    """What a process holds: open descriptors, native threads, resident bytes."""

    descriptors: int
    threads: int
    memory: int


def held() -> Held:
    time.sleep(0.05)  # A joined thread takes a moment to leave the kernel's list.
    process = psutil.Process()
    return Held(len(os.listdir("/proc/self/fd")), process.num_threads(), process.memory_info().rss)


def rebuild(rank: int, world: int, where: Rendezvous) -> Held:
    """Aborts the group of the last call, which has a receive in flight, and builds a new one."""
    for old in _kept:
        old.abort("a rebuild is due")
    comm = connect(where, rank, NAMES[:world], torch.device("cpu"), Deadline(15))
    for old in _kept:
        old.close()
    _kept[:] = [comm]
    buf = torch.full((1 << 20,), rank, dtype=torch.uint8)
    got = torch.zeros_like(buf)
    comm.send(buf, 1 - rank)
    comm.recv(got, 1 - rank)
    comm.synchronize(Deadline(10))
    assert bool((got == 1 - rank).all())
    comm.meet("received", Deadline(10))
    comm.recv(got, 1 - rank)
    return held()


def test_twenty_rebuilds_leave_no_descriptor_thread_or_memory_behind() -> None:
    seen: list[list[Held]] = []
    with rank_processes() as ranks:
        for epoch in range(WARM_UP + REBUILDS):
            with closing(RendezvousHost("127.0.0.1", epoch)) as host:
                outcomes = ranks.run(2, rebuild, host.rendezvous)
            assert [outcome.kind for outcome in outcomes] == ["ok", "ok"], outcomes
            seen.append([*(outcome.value for outcome in outcomes), held()])
    for before, after in zip(seen[WARM_UP - 1], seen[-1], strict=True):
        assert after.descriptors <= before.descriptors
        assert after.threads <= before.threads
        assert after.memory <= before.memory + MEMORY_SLACK
    assert not [thread for thread in threading.enumerate() if "rendezvous" in thread.name]
