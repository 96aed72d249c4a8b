"""Tells how long a trainer rank may take for a request: no time, its own, or that of others."""

from __future__ import annotations

import msgspec

from weight_sync.messages import (
    AwaitVersion,
    GetDigests,
    GetReplicaDigests,
    JoinGroups,
    Quantize,
    Release,
    SendRounds,
    SetProgram,
)

# For publish(), for digests (or the lock that they are made under), or for other ranks.
_WAITING = frozenset(
    kind.__name__
    for kind in (
        AwaitVersion,
        GetDigests,
        GetReplicaDigests,
        JoinGroups,
        Quantize,
        SendRounds,
        SetProgram,
    )
)


# Often nothing is left to wait for, and then there is nothing to do either.
_AT_ONCE = frozenset({AwaitVersion.__name__, Release.__name__})


class _Kind(msgspec.Struct, frozen=True):
    """What all messages have in common."""

    type: str


_decode = msgspec.msgpack.Decoder(_Kind).decode


def waits(request: bytes) -> bool:
    """Whether a request may wait for long; never raises, whatever the bytes are."""
    return _kind(request) in _WAITING


def at_once(request: bytes) -> bool:
    """Whether it is worth asking if a request can be answered at once; never raises either."""
    return _kind(request) in _AT_ONCE


def _kind(request: bytes) -> str:
    try:
        return _decode(request).type
    except msgspec.MsgspecError:
        return ""
