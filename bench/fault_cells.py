"""The cells of the fault matrix: who fails how, at which stage, over which transport."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.fault_injection import KINDS

TRANSPORTS = ("ipc", "broadcast", "reshard")
WHO = ("trainer", "worker", "leader", "orchestrator")
STAGES = ("connect", "plan", "transfer", "install", "verify", "commit")
# Transfers are interrupted at these parts of the victim's own bytes.
PARTS = (0.0, 1 / 3, 2 / 3)

# What an engine worker calls the beginning of a stage.
_WORKER_HOOKS = {"plan": "record"}
# In these, a trainer rank does nothing that could fail: another process' hook sets it off.
_TRAINER_IDLE = ("install", "commit")


@dataclass(frozen=True)
class Cell:
    """One cell.

    Attributes:
        transport: One of ``TRANSPORTS``.
        who: One of ``WHO``.
        fault: One of ``KINDS``.
        stage: One of ``STAGES``.
        part: For transfers, after which part of the bytes.
    """

    transport: str
    who: str
    fault: str
    stage: str
    part: float = 0.0

    @property
    def name(self) -> str:
        """Unique name, e.g. ``"ipc/worker/kill/transfer@0.33"``."""
        at = f"@{self.part:.2f}" if self.stage == "transfer" else ""
        return f"{self.transport}/{self.who}/{self.fault}/{self.stage}{at}"

    @property
    def rebuilds(self) -> bool:
        """Whether the stage only happens when an epoch is built."""
        return self.stage in ("connect", "plan")

    @property
    def own_hook(self) -> bool:
        """Whether the victim passes a hook in this stage itself."""
        if self.who == "trainer":
            return self.stage not in _TRAINER_IDLE
        return self.who != "orchestrator"

    @property
    def hook(self) -> str:
        """Name of the hook that sets the fault off, in the victim or in a worker."""
        if self.who == "trainer" and self.own_hook:
            return self.stage
        if self.stage == "connect" and self.transport == "ipc":
            return "attach"
        return _WORKER_HOOKS.get(self.stage, self.stage)


def all_cells(only: str = "") -> Iterator[Cell]:
    """Every cell whose name contains ``only``, by transport so that fleets can be reused."""
    for transport in TRANSPORTS:
        for stage in STAGES:
            for part in PARTS if stage == "transfer" else (0.0,):
                for who in WHO:
                    for fault in KINDS:
                        cell = Cell(transport, who, fault, stage, part)
                        if only in cell.name:
                            yield cell
