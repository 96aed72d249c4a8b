"""All trainer ranks, and all engine shards, as the synchronizer talks to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from weight_sync.comm.deadline import Deadline
from weight_sync.engine import EngineShard
from weight_sync.errors import WeightSyncError
from weight_sync.fanout import raise_first, run_all
from weight_sync.manifest import Manifest
from weight_sync.messages import (
    Done,
    Failure,
    Message,
    Release,
    TrainerEndpointInfo,
    decode_worker_reply,
    encode,
    to_error,
)
from weight_sync.trainer.peer import TrainerPeer

Reply = TypeVar("Reply", bound=Message)


class TrainerRanks:
    """Connections to every trainer rank."""

    def __init__(self, infos: Sequence[TrainerEndpointInfo]) -> None:
        self.infos = tuple(infos)
        self.peers = tuple(TrainerPeer(t.rank, t.address) for t in infos)

    def manifests(self, deadline: Deadline) -> list[Manifest]:
        """What every rank holds, in rank order."""
        results, errors = run_all(
            {p.name: p for p in self.peers}, lambda p: p.manifest(deadline), deadline, "manifest"
        )
        raise_first(errors)
        return [results[p.name] for p in self.peers]

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
        results, errors = run_all(
            {p.name: p for p in chosen},
            lambda p: p.call(request(p), expect, deadline, stage, version, epoch),
            deadline,
            stage,
            version,
            epoch,
        )
        raise_first(errors)
        return {p.rank: results[p.name] for p in chosen}

    def await_version(self, version: int, epoch: int, deadline: Deadline) -> None:
        """Waits until every rank published ``version``; ranks that did not are named."""
        _, errors = run_all(
            {p.name: p for p in self.peers},
            lambda p: p.await_version(version, epoch, deadline),
            deadline,
            "publish",
            version,
            epoch,
        )
        raise_first(errors)

    def release(self, version: int, error: str, deadline: Deadline) -> dict[str, WeightSyncError]:
        """Tells every rank that the refit ended, and how; returns who could not be told."""
        _, errors = run_all(
            {p.name: p for p in self.peers},
            lambda p: p.call(Release(version, error), Done, deadline, "release", version),
            deadline,
            "release",
            version,
        )
        return errors

    def close(self) -> None:
        """Closes all connections."""
        for peer in self.peers:
            peer.close()


def shard_name(shard: int) -> str:
    """How errors call a shard."""
    return f"shard {shard}"


class Shards:
    """All engine shards of a fleet; calls go to the ones that take part."""

    def __init__(self, shards: Sequence[EngineShard]) -> None:
        self.all = tuple(shards)

    def one(self, shard: int, request: Message, expect: type[Reply]) -> list[Reply]:
        """One request to every worker of a shard; success is an explicit answer from each.

        Raises:
            WeightSyncError: If a worker failed, or answers do not fit the question.
        """
        raw = self.all[shard].call(encode(request))
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
            lambda s: action(self.all[s]),
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
