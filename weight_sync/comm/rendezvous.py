"""Where the ranks of one epoch meet: opened by the control plane, handed to every participant.

Each rebuild opens a new one on a fresh port with a fresh secret, so a process that slept through
a rebuild can neither join nor disturb the new group.
"""

from __future__ import annotations

import secrets

import msgspec

from weight_sync.comm.store_server import StoreServer


class Rendezvous(msgspec.Struct, frozen=True):
    """Everything a participant needs to find the others; travels over the control plane.

    Attributes:
        host: Address of the store.
        port: Its port.
        prefix: Namespace of one group in the store.
        epoch: Membership epoch.
        token: Secret of the store; not shown by ``repr``.
    """

    host: str
    port: int
    prefix: str
    epoch: int
    token: str

    def group(self, name: str) -> Rendezvous:
        """The same store for one more group, e.g. one per pipeline stage."""
        return msgspec.structs.replace(self, prefix=f"{self.prefix}/{name}")

    def key(self, *parts: str | int) -> str:
        """A key of this group and epoch in the store."""
        return "/".join((self.prefix, f"epoch{self.epoch}", *map(str, parts)))

    def __repr__(self) -> str:
        return (
            f"Rendezvous(host={self.host!r}, port={self.port}, prefix={self.prefix!r}, "
            f"epoch={self.epoch})"
        )


class RendezvousHost:
    """Serves the store of one epoch; keep it open as long as the groups built through it.

    Any process may hold it. The control plane is the best place: the store then survives every
    trainer and engine process.

    Args:
        host: Address of this host that all participants can reach.
        epoch: Membership epoch.
        prefix: Namespace of the groups.
        port: Port to bind; 0 takes a free one.

    Raises:
        TransportError: The address cannot be bound.
    """

    def __init__(self, host: str, epoch: int, prefix: str = "weight_sync", port: int = 0) -> None:
        token = secrets.token_hex(16)
        self._server = StoreServer(host, token, port)
        self.rendezvous = Rendezvous(host, self._server.port, prefix, epoch, token)

    def close(self) -> None:
        """Closes the store; may be called again."""
        self._server.close()
