"""Answers a worker's control requests on threads of its own, beside the engine's RPC.

So bytes arrive while the engine generates, and an abort reaches a worker whose main thread is busy.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Protocol

import torch

from weight_sync.errors import PlanMismatchError
from weight_sync.failures import to_failure
from weight_sync.messages import (
    AbortGroups,
    Done,
    Joined,
    JoinGroups,
    Message,
    StageVersion,
    Status,
    VersionStaged,
    WorkerState,
    decode_control_request,
    encode,
)
from weight_sync.wire.address import Address
from weight_sync.wire.server import Server


class Controlled(Protocol):
    """What control requests act on."""

    def join(self, request: JoinGroups) -> Joined:
        """Builds groups."""
        ...

    def stage(self, request: StageVersion) -> VersionStaged:
        """Receives a version into spare memory."""
        ...

    def abort(self, reason: str) -> None:
        """Ends what is going on in the groups."""
        ...

    def state(self) -> WorkerState:
        """What the worker knows of itself."""
        ...


class ControlServer:
    """Serves one attached plan.

    Args:
        target: What requests act on.
        epoch: Aborts of other epochs are not for this one.
        device: Where the worker's parameters are.
        host: Address to listen on; None stays on this machine.
    """

    def __init__(
        self, target: Controlled, epoch: int, device: torch.device, host: str | None
    ) -> None:
        self._target = target
        self._epoch = epoch
        # Digests and copies of staging do not queue behind the engine's own work.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._server = Server(self._serve, host=host)

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self._server.address

    def _serve(self, raw: bytes) -> bytes:
        stage = "serve"
        try:
            request = decode_control_request(raw)
            stage = type(request).__name__.lower()
            stream = self._stream
            # This makes the stream's device current as well.
            with torch.cuda.stream(stream) if stream else nullcontext(), torch.no_grad():
                return encode(self._answer(request))
        except Exception as error:  # Everything that fails must reach the asking side.
            return encode(to_failure(error, stage))

    def _answer(self, request: Message) -> Message:
        match request:
            case JoinGroups():
                return self._target.join(request)
            case StageVersion():
                return self._target.stage(request)
            case AbortGroups(epoch, reason):
                if epoch == self._epoch:
                    self._target.abort(reason)
                return Done()
            case Status():
                return self._target.state()
            case _:
                raise PlanMismatchError(f"this worker does not know {type(request).__name__}")

    def close(self) -> None:
        """Stops serving; safe twice."""
        self._server.close()
