"""Tells requests that wait for something else from those that a trainer rank answers at once."""

from __future__ import annotations

import msgspec

from weight_sync.messages import (
    AwaitVersion,
    GetDigests,
    GetReplicaDigests,
    JoinGroups,
    Quantize,
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


class _Kind(msgspec.Struct, frozen=True):
    """What all messages have in common."""

    type: str


_decode = msgspec.msgpack.Decoder(_Kind).decode


def waits(request: bytes) -> bool:
    """Whether a request may wait for long; never raises, whatever the bytes are."""
    try:
        return _decode(request).type in _WAITING
    except msgspec.MsgspecError:
        return False
