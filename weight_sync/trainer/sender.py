"""The trainer side of broadcast and reshard: packs the next bucket while one is on the wire.

What engines want quantized is still being made meanwhile: a bucket waits for its own pieces only.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.comm.deadline import Deadline
from weight_sync.dtypes import itemsize
from weight_sync.faults import FaultHook, no_fault
from weight_sync.manifest import Manifest
from weight_sync.messages import JoinGroups
from weight_sync.program import BroadcastSends, SenderProgram, SendTask
from weight_sync.sources.quantized import QuantizedSource
from weight_sync.trainer.export import LocalRegions
from weight_sync.trainer.packer import Bucketed, Packer
from weight_sync.transports.groups import Groups, join_groups, trainer_name
from weight_sync.transports.packed import cut_stream, cuts_digest

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class _Sending:
    """What happens to one bucket in one step.

    Attributes:
        packer: Packs it; its buffer only receives if the bucket is another rank's.
        bucket: Number of the bucket for the packer.
        nbytes: Length.
        workers: Who gets it; None broadcasts.
        root: Rank that broadcasts.
    """

    packer: Packer
    bucket: int
    nbytes: int
    workers: tuple[int, ...] | None
    root: int


class GroupSender:
    """One trainer rank's part in the groups of an epoch.

    Args:
        rank: Trainer rank.
        manifest: Its manifest.
        program: Its part of the plan.
        request: The groups, and what to broadcast.
        device: Where buffers lie that go on the wire.
        fault: For fault injection in tests.

    Raises:
        WeightSyncError: If the groups could not be built; none is left then.
    """

    def __init__(
        self,
        rank: int,
        manifest: Manifest,
        program: SenderProgram,
        request: JoinGroups,
        device: torch.device,
        fault: FaultHook = no_fault,
    ) -> None:
        self.epoch = program.epoch
        self._rank = rank
        self._fault = fault
        self._packers: list[Packer] = []
        self._steps: list[list[_Sending]] = []
        self.cuts: dict[str, str] = {}
        if request.sends is not None:
            self._plan_broadcasts(manifest, request.sends, device)
        else:
            names = request.groups[0].names[len(request.groups[0].trainers) :]
            self._plan_sends(manifest, program.sends, request.bucket_bytes, names, device)
        self._ends = (0, *request.rounds)
        self._offset = 0
        cuda = device.type == "cuda"
        # Before whatever else the trainer's GPU does: the wire would wait for a bucket.
        self._lanes = [torch.cuda.Stream(device, priority=-1) if cuda else None for _ in range(2)]
        self._fault("connect")
        self._groups: Groups = join_groups(
            request.groups, trainer_name(rank), device, Deadline(request.seconds)
        )

    def _plan_sends(
        self,
        manifest: Manifest,
        tasks: Sequence[SendTask],
        bucket_bytes: int,
        names: Sequence[str],
        device: torch.device,
    ) -> None:
        """Streams to different workers with the same pieces are packed once and sent to each."""
        owner = manifest.owner.unpack()
        item = np.array([itemsize(manifest.tensors[int(o)].dtype) for o in owner], np.int64)
        alike: dict[tuple[bytes, ...], tuple[SendTask, list[int]]] = {}
        for task in tasks:
            key = (task.region.data, task.offset.data, task.size.data)
            alike.setdefault(key, (task, []))[1].append(task.worker)
        for task, workers in alike.values():
            region = task.region.unpack().astype(np.int64)
            size = task.size.unpack().astype(np.int64)
            unit = task.unit.unpack().astype(np.int32)
            rows = np.arange(len(region), dtype=np.int64)
            stream = cut_stream(rows, size, item[region], unit, bucket_bytes)
            offset = task.offset.unpack().astype(np.int64)
            largest = int(stream.nbytes.max(initial=0))
            pieces = Bucketed(region, offset, size, stream.bucket, stream.offset, largest)
            packer = Packer(manifest, pieces, device)
            self._packers.append(packer)
            for step, nbytes in enumerate(stream.nbytes.tolist()):
                if step == len(self._steps):
                    self._steps.append([])
                self._steps[step].append(_Sending(packer, step, nbytes, tuple(workers), self._rank))
            for worker in workers:
                self.cuts[names[worker]] = cuts_digest(stream.nbytes)

    def _plan_broadcasts(
        self, manifest: Manifest, sends: BroadcastSends, device: torch.device
    ) -> None:
        nbytes = sends.nbytes.unpack().astype(np.int64)
        pieces = Bucketed(
            sends.region.unpack().astype(np.int64),
            sends.offset.unpack().astype(np.int64),
            sends.size.unpack().astype(np.int64),
            sends.bucket.unpack().astype(np.int64),
            sends.start.unpack().astype(np.int64),
            int(nbytes.max(initial=0)),
        )
        packer = Packer(manifest, pieces, device)
        self._packers.append(packer)
        roots = sends.root.unpack().tolist()
        self._steps = [
            [_Sending(packer, bucket, int(nbytes[bucket]), None, root)]
            for bucket, root in enumerate(roots)
        ]
        self.cuts[""] = cuts_digest(nbytes)

    def order(self) -> I64:
        """int64 ``[n]``, this rank's regions in the order in which buckets need them."""
        regions = [
            sending.packer.regions(sending.bucket)
            for step in self._steps
            for sending in step
            if sending.root == self._rank
        ]
        return np.concatenate([np.zeros(0, np.int64), *regions])

    def prepare(self, regions: LocalRegions, generation: int) -> None:
        """Compiles what packs; called before a version, cheap if nothing moved."""
        for packer in self._packers:
            packer.prepare(regions, generation)

    def send(
        self,
        rounds: range,
        version: int,
        deadline: Deadline,
        quantized: QuantizedSource | None = None,
    ) -> None:
        """Sends rounds of a version; returns when all bytes have left.

        Packing is ordered after what was queued on the calling thread's current stream. Workers
        only stage the first round, so nothing live has changed yet when it ends: that is where a
        version is refused whose weights could not be quantized.

        Args:
            rounds: Which.
            version: For errors.
            deadline: When to abort.
            quantized: Where regions come from that may still be in the making.

        Raises:
            RefitError: Naming who did not take part; all groups of the process are aborted then.
            QuantizationError: Naming tensors with values that no format can hold.
        """
        if rounds.start == 0:
            self._offset = 0
        groups = self._groups
        with groups.guard(deadline, "transfer") as inside:
            for lane in self._lanes:
                if lane is not None:
                    lane.wait_stream(torch.cuda.current_stream(lane.device))
            stop = min(self._ends[rounds.stop], len(self._steps))
            for step in range(self._ends[rounds.start], stop):
                self._fault("transfer", self._offset)
                self._step(step, inside, quantized)
            groups.synchronize(inside, version)
            if quantized is not None and rounds.start == 0:
                quantized.check(inside.remaining())

    def _step(self, step: int, deadline: Deadline, quantized: QuantizedSource | None) -> None:
        groups, lane = self._groups, self._lanes[step % 2]
        with torch.cuda.stream(lane) if lane is not None else nullcontext():
            for sending in self._steps[step]:
                if sending.root == self._rank:
                    if quantized is not None:
                        quantized.wait(sending.packer.regions(sending.bucket), lane, deadline)
                    sending.packer.pack(sending.bucket)
                    self._offset += sending.nbytes
        groups.wait_stream(lane)
        with groups.launch():
            for sending in self._steps[step]:
                buffer = sending.packer.slots[sending.bucket % 2][: sending.nbytes]
                if sending.workers is None:
                    groups.broadcast(buffer, sending.root)
                else:
                    for worker in sending.workers:
                        groups.send_to_worker(buffer, worker)
        # The lane's buffers are packed again two steps from now, after this launch.
        groups.release_stream(lane, deadline)

    def abort(self, reason: str) -> None:
        """Ends what is going on, from any thread; the groups must be built again."""
        self._groups.abort(reason)

    def forget(self) -> None:
        """Drops everything that refers to weight memory."""
        for packer in self._packers:
            packer.forget()

    def close(self) -> None:
        """Leaves the groups and frees the buffers."""
        self._groups.close()
        self._packers.clear()
        self._steps.clear()
