"""One request to several trainer ranks at once; a socket each is enough, so no thread is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import WeightSyncError
from weight_sync.fanout import named
from weight_sync.messages import Message
from weight_sync.trainer.peer import TrainerPeer

Reply = TypeVar("Reply", bound=Message)
T = TypeVar("T")


class Round(Generic[Reply]):
    """Requests that were sent, and the errors of those that could not be."""

    def __init__(self, stage: str, version: int | None, epoch: int | None) -> None:
        self._at = stage, version, epoch
        self._replies: dict[TrainerPeer, Callable[[], Reply]] = {}
        self._errors: dict[str, WeightSyncError] = {}

    def add(self, peer: TrainerPeer, send: Callable[[], Callable[[], Reply]]) -> None:
        """Sends a request; what ``send`` raises is the rank's error."""
        self._keep(self._replies, peer, send)

    def outcome(self) -> tuple[dict[TrainerPeer, Reply], dict[str, WeightSyncError]]:
        """Waits for all replies; once.

        Returns:
            Replies by rank, and the errors of the others by name.
        """
        results: dict[TrainerPeer, Reply] = {}
        for peer, wait in self._replies.items():
            self._keep(results, peer, wait)
        return results, self._errors

    def _keep(self, kept: dict[TrainerPeer, T], peer: TrainerPeer, call: Callable[[], T]) -> None:
        """Keeps a result or an error: one rank's must not end what is done with the others."""
        try:
            kept[peer] = call()
        except Exception as error:
            if isinstance(error, WeightSyncError):
                # It says itself what happened and where. A traceback leads to the frames of all
                # callers, which hold the error: they would keep each other, and an engine in this
                # process, until the collector comes. What is none is a defect, and found by it.
                error.__traceback__ = None
            self._errors[peer.name] = named(peer.name, error, *self._at)


@contextmanager
def ask_all(
    peers: Iterable[TrainerPeer],
    request: Callable[[TrainerPeer], Message],
    expect: type[Reply],
    deadline: Deadline,
    stage: str,
    version: int | None = None,
    epoch: int | None = None,
) -> Iterator[Round[Reply]]:
    """Sends every rank its request; until the context is left, the connections are in use."""
    asked: Round[Reply] = Round(stage, version, epoch)
    with ExitStack() as stack:
        for peer in peers:

            def send(peer: TrainerPeer = peer) -> Callable[[], Reply]:
                sent = peer.begin(request(peer), expect, deadline, stage, version, epoch)
                return stack.enter_context(sent)

            asked.add(peer, send)
        yield asked
