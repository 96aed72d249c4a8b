"""All trainer ranks, and all engine shards, as the synchronizer talks to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

from weight_sync.comm.deadline import Deadline
from weight_sync.engine import EngineShard
from weight_sync.errors import DeadlineError, PeerDeadError, WeightSyncError
from weight_sync.failures import to_error
from weight_sync.fanout import raise_first, run_all
from weight_sync.manifest import Manifest
from weight_sync.messages import (
    AwaitVersion,
    Done,
    Failure,
    GetManifest,
    GotManifest,
    Message,
    Published,
    Quantize,
    Release,
    Status,
    TrainerEndpointInfo,
    WorkerState,
    decode_worker_reply,
    encode,
)
from weight_sync.quantize.wanted import QuantSpec
from weight_sync.trainer.peer import TrainerPeer
from weight_sync.trainer.round import ask_all
from weight_sync.wire.address import Address

Reply = TypeVar("Reply", bound=Message)
T = TypeVar("T")


class TrainerRanks:
    """Connections to every trainer rank.

    Attributes:
        infos: Where ranks listen, in rank order.
        peers: One connection each.
        epoch: Newest epoch that a rank holds a plan of, when it was last asked; -1 if none.
    """

    def __init__(self, infos: Sequence[TrainerEndpointInfo]) -> None:
        self.infos = tuple(infos)
        self.peers = tuple(TrainerPeer(t.rank, t.address) for t in infos)
        self.epoch = -1

    @property
    def addresses(self) -> dict[str, Address]:
        """Where each rank listens, by name."""
        return {peer.name: t.address for peer, t in zip(self.peers, self.infos, strict=True)}

    def reconnect(self) -> None:
        """Replaces all connections: after a failure they may be broken or wait for late replies."""
        # All at once, so that nobody waits for one call after the other to end.
        for peer in self.peers:
            peer.abort("the refit that waited for it failed")
        for peer in self.peers:
            peer.close()
        self.peers = tuple(TrainerPeer(t.rank, t.address) for t in self.infos)

    def manifests(self, deadline: Deadline) -> list[Manifest]:
        """What every rank holds itself, in rank order."""
        request = GetManifest(plain=True)
        replies = self.ask(lambda _: request, GotManifest, deadline, "manifest")
        self.epoch = max(reply.epoch for reply in replies.values())
        return [replies[p.rank].manifest for p in self.peers]

    def quantize(
        self, wanted: Sequence[QuantSpec], epoch: int, deadline: Deadline
    ) -> list[Manifest]:
        """Tells every rank what to quantize from an epoch on; what they serve, in rank order."""
        request = Quantize(tuple(wanted), epoch)
        replies = self.ask(lambda _: request, GotManifest, deadline, "quantize")
        return [replies[p.rank].manifest for p in self.peers]

    def ask(
        self,
        request: Callable[[TrainerPeer], Message],
        expect: type[Reply],
        deadline: Deadline,
        stage: str,
        *,
        version: int | None = None,
        epoch: int | None = None,
        ranks: Sequence[int] | None = None,
    ) -> dict[int, Reply]:
        """One request to the given ranks (all if None); replies by rank, errors raised."""
        chosen = self.peers if ranks is None else [self.peers[r] for r in ranks]
        with ask_all(chosen, request, expect, deadline, stage, version, epoch) as asked:
            results, errors = asked.outcome()
        raise_first(errors)
        return {peer.rank: reply for peer, reply in results.items()}

    @contextmanager
    def awaiting(
        self, version: int, epoch: int, deadline: Deadline, *, verify: bool
    ) -> Iterator[Callable[[], None]]:
        """Asks every rank to say when it published ``version``.

        Yields:
            What waits until all did so, and raises an error that names those that did not.
        """
        request = AwaitVersion(version, epoch, deadline.remaining(), verify)
        with ask_all(
            self.peers, lambda _: request, Published, deadline, "publish", version, epoch
        ) as asked:

            def published() -> None:
                replies, errors = asked.outcome()
                raise_first(errors)
                for peer, reply in replies.items():
                    peer.generation = reply.generation

            yield published

    def release(
        self,
        version: int,
        epoch: int,
        error: str,
        deadline: Deadline,
        missing: Collection[str] = (),
    ) -> dict[str, WeightSyncError]:
        """Tells every rank but the missing how the refit ended; returns who was not told."""
        request = Release(version, epoch, error)
        at = "release", version, epoch
        chosen = [peer for peer in self.peers if peer.name not in missing]
        with ask_all(chosen, lambda _: request, Done, deadline, *at) as asked:
            _, errors = asked.outcome()
        # Only the connection may be gone; a dead rank does not answer a new one either.
        lost = {p.name: p for p in chosen if isinstance(errors.get(p.name), PeerDeadError)}

        def tell(peer: TrainerPeer) -> Done:
            with closing(peer.fresh()) as fresh:
                return fresh.call(request, Done, again, *at)

        again = Deadline(deadline.inner())
        told, failed = run_all(lost, tell, again, *at)
        for name in told:
            del errors[name]
        # Silence says less than that the connection broke.
        errors |= {n: e for n, e in failed.items() if not isinstance(e, DeadlineError)}
        if not error:
            for problem in errors.values():
                problem.add_note(f"version {version} is installed; only that was not told")
        return errors

    def close(self) -> None:
        """Closes all connections."""
        for peer in self.peers:
            peer.close()


def shard_name(shard: int) -> str:
    """How errors call a shard."""
    return f"shard {shard}"


class Shards:
    """All engine shards of a fleet; calls go to the ones that take part.

    Attributes:
        all: Shards by number.
        gone: Shards whose front end said that a process of theirs is gone.
    """

    def __init__(self, shards: Sequence[EngineShard]) -> None:
        self.all = tuple(shards)
        self.gone: set[int] = set()

    def replace(self, shard: int, by: EngineShard) -> None:
        """Puts another engine in the place of a shard."""
        self.all = (*self.all[:shard], by, *self.all[shard + 1 :])
        self.gone.discard(shard)

    def still_gone(self, suspects: Collection[int], seconds: float) -> set[int]:
        """Shards that are gone; of the suspects only those whose front end says so again.

        Args:
            suspects: Shards whose workers run: only a connection may have been lost.
            seconds: How long an answer may take.
        """
        again = self.gone.intersection(suspects)
        self.gone -= again
        self.ask(dict.fromkeys(again, Status()), WorkerState, Deadline(seconds), "roll call")
        return set(self.gone)

    def _reach(self, shard: int, action: Callable[[EngineShard], T]) -> T:
        try:
            return action(self.all[shard])
        except PeerDeadError:
            self.gone.add(shard)
            raise

    def one(self, shard: int, request: Message, expect: type[Reply]) -> list[Reply]:
        """One request to every worker of a shard; success is an explicit answer from each.

        Raises:
            WeightSyncError: If a worker failed, or answers do not fit the question.
        """
        raw = self._reach(shard, lambda engine: engine.call(encode(request)))
        width = self.all[shard].workers
        if len(raw) != width:
            raise WeightSyncError(
                f"shard {shard} answered for {len(raw)} of {width} workers; restart the shard"
            )
        replies: list[Reply] = []
        for worker, data in enumerate(raw):
            reply = decode_worker_reply(data)
            who = f"shard {shard} worker {worker}"
            if isinstance(reply, Failure):
                raise to_error(reply, who)
            if not isinstance(reply, expect) or getattr(reply, "worker", worker) != worker:
                raise WeightSyncError(
                    f"{who} answered {type(reply).__name__} where {expect.__name__} was expected; "
                    "an earlier reply was lost, restart the shard"
                )
            replies.append(reply)
        return replies

    def ask(
        self,
        requests: Mapping[int, Message],
        expect: type[Reply],
        deadline: Deadline,
        stage: str,
        *,
        version: int | None = None,
        epoch: int | None = None,
    ) -> tuple[dict[int, list[Reply]], dict[int, WeightSyncError]]:
        """One request per shard; replies and errors by shard."""
        results, errors = run_all(
            {shard_name(s): s for s in requests},
            lambda s: self.one(s, requests[s], expect),
            deadline,
            stage,
            version,
            epoch,
        )
        return (
            {s: results[shard_name(s)] for s in requests if shard_name(s) in results},
            {s: errors[shard_name(s)] for s in requests if shard_name(s) in errors},
        )

    def apply(
        self,
        shards: Sequence[int],
        action: Callable[[EngineShard], None],
        deadline: Deadline,
        stage: str,
        *,
        version: int | None = None,
        epoch: int | None = None,
    ) -> tuple[list[int], dict[int, WeightSyncError]]:
        """An action on each shard; which succeeded, and errors of the others."""
        results, errors = run_all(
            {shard_name(s): s for s in shards},
            lambda s: self._reach(s, action),
            deadline,
            stage,
            version,
            epoch,
        )
        return (
            [s for s in shards if shard_name(s) in results],
            {s: errors[shard_name(s)] for s in shards if shard_name(s) in errors},
        )


def raise_shards(errors: Mapping[int, WeightSyncError]) -> None:
    """Raises the most telling error of several shards; nothing if there is none."""
    raise_first({shard_name(s): e for s, e in errors.items()})
