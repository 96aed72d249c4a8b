"""Two trainer ranks, two shards of two workers and an orchestrator, all processes of their own."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from bench.fault_census import Census, socket_directories
from bench.fault_processes import FaultOrchestrator, FaultTrainer, FaultWorker
from bench.models import config
from tests.harness.processes import Child, ChildError, ChildGoneError

# Every call of the synchronizer ends within this; the rest is for processes to be scheduled.
LIMIT_S = 3.5
DEADLINE_S = 4.0
SILENCE_S = 1.0
_BUCKET_BYTES = 32 << 10
_START_S = 60.0
# How long what a failure left running may take to end: native connects have time-outs of their own.
_SETTLE_S = 6.0
_LEAK_S = 20.0
_POLL_S = 0.1

RANKS, SHARDS, WIDTH = 2, 2, 2


class HealError(Exception):
    """The fleet could not be brought back; it must be started anew."""


class AbsentError(HealError):
    """A shard was lost once more: its broken connection showed only now."""


@dataclass
class Shard:
    """The workers of one shard."""

    workers: list[Child]


class Fleet:
    """Processes of one transport; a context manager that ends them all."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self.version = 0
        self._root = tempfile.TemporaryDirectory(prefix="faults-")
        self._env = {"WEIGHT_SYNC_SOCKET_DIR": self._root.name, "OMP_NUM_THREADS": "1"}
        self._cfg = config("tiny")
        self.trainers = [self._trainer(rank) for rank in range(RANKS)]
        self.shards = [Shard([self._worker(rank) for rank in range(WIDTH)]) for _ in range(SHARDS)]
        self.orchestrator = self._orchestrator()

    # --- processes ------------------------------------------------------------------------------

    def _child(self, make: type, *args: object) -> Child:
        return Child(make, *args, env=self._env, start_seconds=_START_S)

    def _trainer(self, rank: int) -> Child:
        # The last rank cannot export its storages, so that ipc has buckets to stop at.
        return self._child(FaultTrainer, self._cfg, rank, RANKS, rank == RANKS - 1)

    def _worker(self, rank: int) -> Child:
        return self._child(FaultWorker, self._cfg, rank, WIDTH)

    def _orchestrator(self) -> Child:
        options = {
            "deadline_s": LIMIT_S,
            "silence_s": SILENCE_S,
            "bucket_bytes": _BUCKET_BYTES,
        }
        infos = [t.ask("info") for t in self.trainers]
        addresses = [self.addresses(i) for i in range(SHARDS)]
        return self._child(FaultOrchestrator, self.transport, infos, addresses, options)

    def addresses(self, shard: int) -> list[object]:
        """Where the workers of a shard listen."""
        return [w.ask("address") for w in self.shards[shard].workers]

    def victim(self, who: str) -> Child:
        """Which process fails; the others of its kind survive."""
        return {
            "trainer": self.trainers[-1],
            "worker": self.shards[-1].workers[-1],
            "leader": self.shards[-1].workers[0],
            "orchestrator": self.orchestrator,
        }[who]

    @property
    def trigger(self) -> Child:
        """A worker of a shard that survives, whose hooks set off faults of others."""
        return self.shards[0].workers[0]

    def processes(self) -> dict[str, Child]:
        """All processes by name."""
        named = {f"trainer {r}": t for r, t in enumerate(self.trainers)}
        for s, shard in enumerate(self.shards):
            named |= {f"shard {s} worker {w}": child for w, child in enumerate(shard.workers)}
        return named | {"orchestrator": self.orchestrator}

    # --- refits ---------------------------------------------------------------------------------

    def publish(self) -> int:
        """Trainers publish the next version."""
        self.version += 1
        for trainer in self.trainers:
            trainer.ask("publish", self.version)
        return self.version

    def refit(self) -> float:
        """One good refit of everybody; how long it took, in seconds.

        Raises:
            AbsentError: If a shard did not take part; the others are not looked at.
            HealError: If not every shard serves the new version, bit by bit.
        """
        version = self.publish()
        start = time.monotonic()
        try:
            report = self.orchestrator.ask("sync", version, seconds=LIMIT_S + _SETTLE_S)
        except (ChildError, ChildGoneError, TimeoutError) as error:
            raise HealError(f"the next refit failed: {error}") from error
        took = time.monotonic() - start
        if report["absent"]:  # type: ignore[index]
            raise AbsentError(f"shards {report['absent']} did not take part")  # type: ignore[index]
        wrong = [v for v in self.verdicts().values() if v != (True, version, True)]
        if wrong:
            raise HealError(f"after the next refit of version {version}: {self.verdicts()}")
        return took

    def rebuild(self) -> None:
        """Makes the next refit build a new epoch."""
        self.orchestrator.ask("replace", 0, self.addresses(0))

    def verdicts(self) -> dict[str, tuple[bool, int, bool]]:
        """What every living worker says: serves, version, whether its bits are that version's."""
        return {
            name: child.ask("verdict", _SETTLE_S, seconds=2 * _SETTLE_S)  # type: ignore[misc]
            for name, child in self.processes().items()
            if name.startswith("shard") and child.process.is_alive()
        }

    def consistent(self) -> bool:
        """Whether every shard that serves has exactly the version it reports, on every worker."""
        for shard in self.shards:
            if not all(w.process.is_alive() for w in shard.workers):
                continue
            said = [w.ask("verdict", _SETTLE_S, seconds=2 * _SETTLE_S) for w in shard.workers]
            verdicts = [cast("tuple[bool, int, bool]", verdict) for verdict in said]
            if all(serves for serves, _, _ in verdicts):
                versions = {version for _, version, _ in verdicts}
                if len(versions) > 1 or not all(equal for _, _, equal in verdicts):
                    return False
        return True

    # --- census ---------------------------------------------------------------------------------

    def census(self) -> dict[int, Census]:
        """What every process holds, by process id."""
        return {p.pid: p.ask("census") for p in self.processes().values()}  # type: ignore[misc]

    def leaks(self, before: dict[int, Census]) -> list[str]:
        """What survivors hold now and did not hold before, once it had time to end."""
        end = time.monotonic() + _LEAK_S
        while True:
            found = [
                f"{name}: {what}"
                for name, child in self.processes().items()
                if child.pid in before
                for what in child.ask("census").beyond(before[child.pid])  # type: ignore[attr-defined]
            ]
            living = {child.pid for child in self.processes().values()}
            found += [f"socket directory {d}" for d in socket_directories(self._root.name, living)]
            if not found or time.monotonic() > end:
                return found
            time.sleep(_POLL_S)

    # --- healing --------------------------------------------------------------------------------

    def thaw(self, child: Child) -> None:
        """Lets a stopped process go on."""
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGCONT)

    def heal(self) -> None:
        """Replaces dead processes; everybody takes part in the next refit."""
        dead_trainers = [r for r, t in enumerate(self.trainers) if not t.process.is_alive()]
        for rank in dead_trainers:
            self.trainers[rank].close()
            self.trainers[rank] = self._trainer(rank)
        renewed = set()
        for number, shard in enumerate(self.shards):
            for rank, worker in enumerate(shard.workers):
                if not worker.process.is_alive():
                    worker.close()
                    shard.workers[rank] = self._worker(rank)
                    renewed.add(number)
        if dead_trainers or not self.orchestrator.process.is_alive():
            # A trainer's addresses are new, so is whoever refits from it.
            self.orchestrator.close()
            self.orchestrator = self._orchestrator()
        else:
            absent: tuple[int, ...] = self.orchestrator.ask("absent")  # type: ignore[assignment]
            for index in renewed.union(absent):
                self.orchestrator.ask("replace", index, self.addresses(index))

    def take_over(self) -> None:
        """Starts a new orchestrator beside the one there is."""
        self.orchestrator = self._orchestrator()

    def close(self) -> None:
        """Ends all processes."""
        for child in self.processes().values():
            child.close()
        self._root.cleanup()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
