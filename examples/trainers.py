"""The main process's handle on the trainer ranks: starts them, commands them, awaits replies."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from commands import (
    ENCODER,
    REPLIES,
    Command,
    Done,
    Failed,
    Publish,
    Sample,
    Save,
    Score,
    Step,
    Stop,
)
from weight_sync.messages import TrainerEndpointInfo

COMMAND_DEADLINE_S = 180.0
STOP_DEADLINE_S = 20.0


class TrainerError(RuntimeError):
    """A trainer rank failed, died, or did not answer in time."""


class Trainers:
    """The FSDP2 ranks, as one object. Use it as a context manager: leaving it ends the processes.

    Starting returns at once; ``ready`` waits until every rank holds its shard.

    Args:
        checkpoint: Directory that the ranks load.
        gpus: Number of ranks, each on a GPU of its own; 0 for two on the CPU.
    """

    def __init__(self, checkpoint: Path, gpus: int) -> None:
        self.world = world = gpus or 2
        self._folder = tempfile.TemporaryDirectory(prefix="trainers-")
        self._connections: list[Connection] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        threads = max(1, len(os.sched_getaffinity(0)) // world)
        environment = {
            # All ranks are on this host; without this gloo looks up the host's name.
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            # Waiting threads sleep: spinning ones starve the engine when the cores are shared.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        script = Path(__file__).with_name("fsdp_trainer.py")
        store = Path(self._folder.name) / "store"
        for rank in range(world):
            ours, theirs = Pipe()
            arguments = [str(rank), str(world), str(store), str(checkpoint), str(theirs.fileno())]
            arguments.append("cuda" if gpus else "cpu")
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, str(script), *arguments],
                    env=environment,
                    pass_fds=[theirs.fileno()],
                )
            )
            theirs.close()  # Else the death of the rank would not end our reads.
            self._connections.append(ours)

    def ready(self) -> list[TrainerEndpointInfo]:
        """Waits until every rank has loaded its shard; returns where each serves its weights."""
        return [r.endpoint for r in self._replies("start") if r.endpoint is not None]

    def step(self, samples: list[Sample]) -> float:
        """Takes one optimizer step on all ranks.

        Args:
            samples: The whole batch; its length must be a multiple of the number of ranks.

        Returns:
            The policy loss of the batch.
        """
        tokens = sum(len(s.completion) for s in samples)
        return sum(r.loss for r in self._call(lambda rank: Step(self._part(samples, rank), tokens)))

    def score(self, samples: list[Sample]) -> list[list[float]]:
        """The trainer's log-probabilities of every sample's completion, in the order given."""
        replies = self._call(lambda rank: Score(self._part(samples, rank)))
        return [replies[i % self.world].logprobs[i // self.world] for i in range(len(samples))]

    def publish(self, version: int) -> None:
        """Says on every rank that its weights are at ``version``, for the refit to read."""
        self._call(lambda _: Publish(version))

    def save(self, path: Path) -> None:
        """Writes a full bf16 checkpoint to ``path``, which must not exist."""
        self._call(lambda _: Save(str(path)))

    def close(self) -> None:
        """Ends every rank, by force if it does not leave in time. May be called twice."""
        for connection in self._connections:
            try:
                connection.send_bytes(ENCODER.encode(Stop()))
            except OSError:
                continue  # Already gone.
        deadline = time.monotonic() + STOP_DEADLINE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._folder.cleanup()

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _part(self, samples: list[Sample], rank: int) -> list[Sample]:
        if len(samples) % self.world:
            # Ranks must run the same number of passes, since every pass is a collective.
            raise ValueError(f"{len(samples)} samples do not divide over {self.world} ranks")
        return samples[rank :: self.world]

    def _call(self, command: Callable[[int], Command]) -> list[Done]:
        commands = [command(rank) for rank in range(self.world)]
        for connection, message in zip(self._connections, commands, strict=True):
            connection.send_bytes(ENCODER.encode(message))
        return self._replies(type(commands[0]).__name__)

    def _replies(self, what: str) -> list[Done]:
        deadline = time.monotonic() + COMMAND_DEADLINE_S
        replies = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise TrainerError(
                    f"{what}: trainer {rank} gave no answer in {COMMAND_DEADLINE_S} s"
                )
            try:
                reply = REPLIES.decode(connection.recv_bytes())
            except (EOFError, OSError) as error:
                raise TrainerError(f"{what}: trainer {rank} is gone; see its output") from error
            if isinstance(reply, Failed):
                raise TrainerError(f"{what}: trainer {rank} failed:\n{reply.error}")
            replies.append(reply)
        return replies
