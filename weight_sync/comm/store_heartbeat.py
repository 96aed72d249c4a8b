"""Heartbeats through the rendezvous store: each participant its own key, one reader for all."""

from __future__ import annotations

from collections.abc import Sequence

from weight_sync.comm.deadline import Deadline
from weight_sync.comm.heartbeat import HeartbeatBoard, HeartbeatPublisher
from weight_sync.comm.rendezvous import Rendezvous
from weight_sync.comm.store_client import StoreClient

#: How long the store may take for one beat, in seconds; a slow store is not a silent process.
_PUT_SECONDS = 10.0


class StoreHeartbeat:
    """Publishes the beats of this process; has a connection of its own, so no wait delays it.

    Args:
        rendezvous: Whose store to use.
        name: This participant.
        interval: Seconds between beats.
        deadline: Until when to reach the store.

    Raises:
        DeadlineError: The store was not reached.
    """

    def __init__(
        self, rendezvous: Rendezvous, name: str, interval: float, deadline: Deadline
    ) -> None:
        self._client = StoreClient(rendezvous.host, rendezvous.port, rendezvous.token, deadline)
        key = rendezvous.key("beat", name)
        self._publisher = HeartbeatPublisher(
            lambda count: self._client.put(key, str(count).encode(), Deadline(_PUT_SECONDS)),
            interval,
        )

    def close(self) -> None:
        """Ends the thread and its connection."""
        self._client.interrupt()
        self._publisher.close()
        self._client.close()


def read_heartbeats(
    client: StoreClient,
    rendezvous: Rendezvous,
    names: Sequence[str],
    board: HeartbeatBoard,
    now: float,
    deadline: Deadline,
) -> None:
    """Records on ``board`` which participants have a newer beat in the store than before.

    Raises:
        TransportError: The store is lost.
    """
    keys = {rendezvous.key("beat", name): name for name in names}
    found = client.wait(list(keys), deadline, seconds=0.0)
    for key, raw in found.items():
        board.record(keys[key], int(raw), now)
