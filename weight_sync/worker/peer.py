"""The control plane's connection to the control server of one engine worker."""

from __future__ import annotations

from weight_sync.messages import decode_control_reply
from weight_sync.wire.address import Address
from weight_sync.wire.typed_client import TypedClient


class WorkerPeer(TypedClient):
    """Typed calls to one worker, beside its engine's RPC.

    Args:
        name: How errors call it, e.g. ``"shard 0 worker 1"``.
        address: Where its control server listens.
    """

    def __init__(self, name: str, address: Address) -> None:
        super().__init__(name, address, decode_control_reply)

    def fresh(self) -> WorkerPeer:
        """One more connection to the same worker, for a call that must not wait for others."""
        return WorkerPeer(self.name, self._address)
