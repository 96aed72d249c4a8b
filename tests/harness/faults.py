"""Chooses what goes wrong in a worker, and where."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from weight_sync.comm.deadline import Deadline
from weight_sync.messages import TrainerEndpointInfo
from weight_sync.program import ReceiverProgram
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.transports.base import Delivery, ReceiverTransport
from weight_sync.transports.registry import Factory, register_transport

"""Stage -> ``("raise", text)``, ``("sleep", seconds)``, ``("kill",)`` or ``("flip",)``."""
Actions = Mapping[str, tuple[object, ...]]


class InjectedError(Exception):
    """What a worker raises because the test wants it to."""


class Faults:
    """The hook of one worker: every action happens once, unless it is marked ``"always"``."""

    def __init__(self, actions: Actions | None = None) -> None:
        self.actions = dict(actions or {})
        self.seen: list[str] = []

    def __call__(self, stage: str, offset: int = 0) -> None:
        self.seen.append(stage)
        action = self._take(stage)
        match action:
            case None | ("flip", *_):
                return
            case ("raise", text, *_):
                raise InjectedError(text)
            case ("sleep", float(seconds), *_):
                time.sleep(seconds)
            case ("kill", *_):
                os.kill(os.getpid(), signal.SIGKILL)
            case other:
                raise ValueError(f"unknown action {other}")

    def _take(self, stage: str) -> tuple[object, ...] | None:
        action = self.actions.get(stage)
        if action is not None and "always" not in action:
            del self.actions[stage]
        return action

    def flips(self, stage: str) -> bool:
        """Whether this bucket loses a bit on the way."""
        return self.actions.get(stage, ())[:1] == ("flip",)


class FaultyReceiver:
    """Any transport's engine side, with faults at ``connect`` and before every bucket."""

    def __init__(self, inner: ReceiverTransport, faults: Mapping[int, Faults]) -> None:
        self._inner = inner
        self._by_worker = faults
        self._faults = Faults()

    @property
    def extra_bytes(self) -> int:
        return self._inner.extra_bytes

    def connect(
        self,
        program: ReceiverProgram,
        trainers: Sequence[TrainerEndpointInfo],
        deadline: Deadline,
    ) -> None:
        self._faults = self._by_worker.get(program.worker, self._faults)
        self._faults("connect")
        self._inner.connect(program, trainers, deadline)

    def transfer(self, version: int, deadline: Deadline) -> Iterator[Delivery]:
        for number, delivery in enumerate(self._inner.transfer(version, deadline)):
            stage = f"bucket {number}"
            flips = self._faults.flips(stage)
            self._faults(stage)
            yield _flipped(delivery) if flips else delivery
        self._faults("last bucket")

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()


def _flipped(delivery: Delivery) -> Delivery:
    """The delivery with the lowest bit of its first piece's first element turned over."""
    buffers = [b.clone() for b in delivery.buffers]  # type: ignore[union-attr]
    dtype = getattr(torch, delivery.dtypes[0])
    at = int(delivery.offset[0]) * dtype.itemsize
    buffers[int(delivery.buffer[0])][at] ^= 1
    return dataclasses.replace(delivery, buffers=buffers, key=object())


def register_faulty(name: str, inner: Factory, faults: Mapping[int, Faults]) -> None:
    """Registers a transport whose workers fail as told: dense worker number -> faults."""

    def receiver(device: torch.device, peers: dict[int, TrainerPeer]) -> FaultyReceiver:
        return FaultyReceiver(inner(device, peers), faults)

    register_transport(name, receiver)
