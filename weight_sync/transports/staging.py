"""The engine side of broadcast and reshard: bytes land in spare memory, then are delivered.

The first round is staged while the engine goes on generating. If it is the only one, what follows
under the pause is one local copy. Otherwise further rounds arrive during the pause, each while the
one before is installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.comm.deadline import Deadline
from weight_sync.dtypes import itemsize
from weight_sync.errors import EngineStateError, LayoutError
from weight_sync.faults import FaultHook, no_fault
from weight_sync.messages import Joined, JoinGroups, TrainerEndpointInfo
from weight_sync.program import ReceiverProgram
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.transports.base import Delivery
from weight_sync.transports.broadcast import BroadcastArrivals
from weight_sync.transports.groups import Groups, join_groups
from weight_sync.transports.landing import Arrivals, Landing
from weight_sync.transports.packed import packed_strides
from weight_sync.transports.reshard import ReshardArrivals

I64 = NDArray[np.int64]

# What an engine may still allocate after start-up is left to it.
_SPARE_FRACTION = 0.9
_CPU_FRACTION = 0.25


def spare_bytes(device: torch.device) -> int:
    """Memory on the worker's device that staging may use."""
    if device.type == "cuda":
        # What an earlier epoch staged into is free again, but torch still holds it.
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0] * _SPARE_FRACTION)
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(int(line.split()[1]) * 1024 * _CPU_FRACTION)
    raise EngineStateError("/proc/meminfo does not say how much memory is available")


class StagedReceiver:
    """A ``ReceiverTransport`` that stages.

    Args:
        device: Where the worker's parameters are.
        peers: Connections to the trainer ranks of the program, for their manifests.
        fault: For fault injection in tests.
    """

    def __init__(
        self, device: torch.device, peers: dict[int, TrainerPeer], fault: FaultHook = no_fault
    ) -> None:
        self._device = device
        self._peers = peers
        self._fault = fault
        self._groups: Groups | None = None
        self._arrivals: Arrivals | None = None
        self._arenas: list[torch.Tensor] = []
        self._landings: list[Landing] = []
        self._deliveries: list[Delivery] = []
        self._rounds: list[range] = []
        self._arrived = 0
        self._staged: int | None = None
        self._aborted = ""

    @property
    def extra_bytes(self) -> int:
        """Bytes of arenas and scratch buffers; they are kept from refit to refit."""
        scratch = self._arrivals.scratch_bytes if self._arrivals is not None else 0
        return sum(arena.numel() for arena in self._arenas) + scratch

    def connect(
        self,
        program: ReceiverProgram,
        trainers: Sequence[TrainerEndpointInfo],
        deadline: Deadline,
    ) -> None:
        """Looks up how every piece is stored on the wire; groups are built by :meth:`join`."""
        self._program = program
        sender = program.sender.unpack()
        self._dtypes = np.empty(len(sender), object)
        for rank, peer in self._peers.items():
            rows = np.flatnonzero(sender == rank)
            self._dtypes[rows] = peer.wire_dtypes(program, rows)

    def join(self, request: JoinGroups) -> Joined:
        """Builds groups and arenas; nothing is received yet.

        Raises:
            WeightSyncError: Naming who did not come and why; no group is left then.
        """
        program = self._program
        item = np.array([itemsize(d) for d in self._dtypes.tolist()], np.int64)
        arrivals: Arrivals
        if request.keeps is not None:
            arrivals = BroadcastArrivals(
                program, request.keeps, self._dtypes.tolist(), item, self._device
            )
        else:
            arrivals = ReshardArrivals(program, item, request.bucket_bytes)
        ends = request.rounds
        self._rounds = [range(a, b) for a, b in zip((0, *ends[:-1]), ends, strict=True)]
        self._landings = [arrivals.landing(steps) for steps in self._rounds]
        seen = sum(len(landing.rows) for landing in self._landings)
        if seen != len(item):
            raise LayoutError(
                f"the rounds bring {seen} of {len(item)} pieces of worker {program.worker}; plan "
                "again"
            )
        sizes = [landing.nbytes for landing in self._landings]
        self._arenas = [
            torch.empty(max(sizes[first::2]), dtype=torch.uint8, device=self._device)
            for first in range(min(2, len(sizes)))
        ]
        self._deliveries = [self._delivery(number, item) for number in range(len(sizes))]
        self._arrivals = arrivals
        first = request.groups[0]
        name = first.names[len(first.trainers) + program.worker]
        self._fault("connect")
        groups = join_groups(request.groups, name, self._device, Deadline(request.seconds))
        self._groups = groups
        if self._aborted:
            groups.abort(self._aborted)
        return Joined(arrivals.cuts)

    def _delivery(self, number: int, item: I64) -> Delivery:
        landing = self._landings[number]
        size = self._program.size.unpack().astype(np.int64)[landing.rows]
        return Delivery(
            rows=landing.rows,
            buffers=[self._arenas[number % 2]],
            buffer=np.zeros(len(landing.rows), np.int32),
            offset=landing.offset // item[landing.rows],
            stride=packed_strides(size),
            dtypes=tuple(self._dtypes[landing.rows].tolist()),
            key=("round", number),
        )

    @property
    def complete(self) -> bool:
        """Whether one round brings everything, so that all is verified before the commit."""
        return len(self._rounds) == 1

    def stage(self, version: int, deadline: Deadline) -> Delivery:
        """Receives the first round and returns it; live memory is not touched.

        Raises:
            RefitError: Naming who did not deliver; all groups of the process are aborted then.
        """
        groups = self._built()
        self._staged = None
        self._arrived = 0
        with groups.guard(deadline, "transfer") as inside:
            self._launch(0, inside)
            self._finish(version, inside)
        self._staged = version
        return self._deliveries[0]

    def transfer(self, version: int, deadline: Deadline) -> Iterator[Delivery]:
        """Delivers what was staged, then receives and delivers further rounds.

        Raises:
            EngineStateError: If ``version`` was not staged; nothing was changed.
        """
        if self._staged != version:
            raise EngineStateError(
                f"version {version} is to be installed but "
                f"{'nothing' if self._staged is None else self._staged} is staged; nothing was "
                "changed, refit again"
            )
        self._staged = None
        return self._deliver(version, deadline)

    def _deliver(self, version: int, deadline: Deadline) -> Iterator[Delivery]:
        if self.complete:
            yield self._deliveries[0]
            return
        groups = self._built()
        for number, delivery in enumerate(self._deliveries):
            # The other arena was installed and released before this one is asked for.
            following = number + 1 < len(self._deliveries)
            if following:
                with groups.guard(deadline, "transfer") as inside:
                    self._launch(number + 1, inside)
            yield delivery
            if following:
                with groups.guard(deadline, "transfer") as inside:
                    self._finish(version, inside)

    def _launch(self, number: int, deadline: Deadline) -> None:
        groups, arrivals = self._built(), self._arrivals
        assert arrivals is not None
        landing, arena = self._landings[number], self._arenas[number % 2]
        for step in self._rounds[number]:
            if step >= arrivals.steps:
                break
            self._fault("transfer", self._arrived)
            self._arrived += arrivals.launch(groups, step, landing, arena, deadline)

    def _finish(self, version: int, deadline: Deadline) -> None:
        assert self._arrivals is not None
        self._built().synchronize(deadline, version)
        self._arrivals.finish()

    def _built(self) -> Groups:
        if self._groups is None:
            raise EngineStateError("this worker is in no group; run init_communicator() again")
        return self._groups

    def abort(self, reason: str) -> None:
        """Ends a transfer, from any thread; the groups must be built again."""
        self._aborted = self._aborted or reason
        if self._groups is not None:
            self._groups.abort(reason)

    def close(self) -> None:
        """Leaves all groups and frees the arenas."""
        self._staged = None
        if self._groups is not None:
            self._groups.close()
        self._deliveries.clear()
        self._arenas.clear()
        self._arrivals = None
