"""What travels between the demo's main process and its trainer ranks: msgspec structs."""

from __future__ import annotations

import msgspec

from weight_sync.messages import TrainerEndpointInfo


class Sample(msgspec.Struct, frozen=True):
    """One sampled completion.

    Attributes:
        prompt: Token ids given to the engine.
        completion: Token ids that it sampled, at least one.
        logprobs: The engine's natural-log probability of each sampled token.
        advantage: Group-relative advantage of the whole completion.
    """

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    advantage: float


class Step(msgspec.Struct, frozen=True, tag=True):
    """Take one optimizer step on these samples (this rank's part of the batch).

    Attributes:
        samples: This rank's samples.
        tokens: Sampled tokens of the whole batch, all ranks; the loss is a mean over them.
    """

    samples: list[Sample]
    tokens: int


class Score(msgspec.Struct, frozen=True, tag=True):
    """Compute the trainer's log-probabilities of these samples with the current weights."""

    samples: list[Sample]


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Say to the refit that the weights are at ``version`` and stay so until it ended."""

    version: int


class Save(msgspec.Struct, frozen=True, tag=True):
    """Write a full checkpoint to ``path``. It gathers, as saving may; a refit never does."""

    path: str


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Leave."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """A rank finished the command (or its start).

    Attributes:
        loss: This rank's share of the policy loss; 0 when no step was taken.
        logprobs: For ``Score``, one list per sample, in the order given.
        endpoint: At the start, where engines find this rank's weights.
    """

    loss: float = 0.0
    logprobs: list[list[float]] = []
    endpoint: TrainerEndpointInfo | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A rank could not carry out the command; ``error`` is its traceback."""

    error: str


Command = Step | Score | Publish | Save | Stop
Reply = Done | Failed

ENCODER = msgspec.msgpack.Encoder()
COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
