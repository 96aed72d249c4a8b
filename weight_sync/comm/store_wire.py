"""Messages of the rendezvous store and their framing: a length, then one msgpack struct."""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec

from weight_sync.errors import TransportError

#: Largest frame either side accepts, in bytes; facts of 512 ranks take about a fifth of it.
MAX_FRAME = 1 << 20

_LENGTH = struct.Struct("!I")
HEADER_BYTES = _LENGTH.size


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of a connection.

    Attributes:
        token: The secret of the rendezvous; a wrong one ends the connection.
        fate_key: Key under which the server notes that this connection was lost, if any.
    """

    token: str
    fate_key: str | None = None


class Put(msgspec.Struct, frozen=True, tag=True):
    """Stores ``value`` and forgets ``drop``; with ``once``, a value already there stays."""

    key: str
    value: bytes
    drop: str | None = None
    once: bool = False


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Answers when all keys exist, any key starts with ``unless``, or ``seconds`` have passed."""

    keys: tuple[str, ...]
    seconds: float
    unless: str | None = None


class Found(msgspec.Struct, frozen=True, tag=True):
    """Those of the asked keys that exist, plus everything under ``unless``."""

    values: dict[str, bytes] = {}


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The server ends the connection and says why."""

    reason: str


T = TypeVar("T")

Request = Hello | Put | Wait
Reply = Found | Refused

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


def frame(message: Request | Reply) -> bytes:
    """Encodes one message.

    Raises:
        TransportError: It would be longer than ``MAX_FRAME``.
    """
    body = _encoder.encode(message)
    _check_length(len(body))
    return _LENGTH.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """Length of the body that follows ``header``, checked before anything is allocated.

    Raises:
        TransportError: The header announces more than ``MAX_FRAME`` bytes.
    """
    (length,) = _LENGTH.unpack(header)
    _check_length(length)
    return length


def decode_request(body: bytes) -> Request:
    """Decodes what a client sent; raises :class:`TransportError` if it is no request."""
    return _decode(_requests, body)


def decode_reply(body: bytes) -> Reply:
    """Decodes what the server sent; raises :class:`TransportError` if it is no reply."""
    return _decode(_replies, body)


def _decode(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise TransportError(
            f"the rendezvous store read a message it does not know ({error}); another program "
            "uses this port, or the two sides run different versions of this library"
        ) from error


def _check_length(length: int) -> None:
    if length > MAX_FRAME:
        raise TransportError(
            f"a rendezvous frame of {length} bytes exceeds {MAX_FRAME}; another program uses this "
            "port, or a value is too large for the store: send it through the group instead"
        )
