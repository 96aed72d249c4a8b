"""Engine shards whose workers are processes that answer ``rpc``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.harness.processes import Child, ChildGoneError
from weight_sync.errors import PeerDeadError


class ProcessShard:
    """An ``EngineShard`` of children that are not real engines: nothing to pause or invalidate.

    Args:
        make: Builds one worker in its process.
        args: Arguments per worker.
        vllm: Whether workers need vLLM.
    """

    def __init__(
        self,
        make: Callable[..., object],
        args: Sequence[tuple[object, ...]],
        *,
        vllm: bool = False,
    ) -> None:
        self._make = make
        self._vllm = vllm
        self._args = list(args)
        self.workers = len(self._args)
        self.ranks = [self._start(a) for a in self._args]

    def restart(self, rank: int) -> None:
        """Replaces a dead worker."""
        self.ranks[rank].close()
        self.ranks[rank] = self._start(self._args[rank])

    def _start(self, args: tuple[object, ...]) -> Child:
        return Child(self._make, *args, vllm=self._vllm)

    def ask(self, method: str, *args: object, seconds: float = 60) -> list[object]:
        """Runs a method on all workers at once and returns their answers."""
        for rank in self.ranks:
            rank.send(method, *args)
        return [rank.receive(seconds) for rank in self.ranks]

    def call(self, request: bytes) -> list[bytes]:
        try:
            return self.ask("rpc", request)  # type: ignore[return-value]
        except ChildGoneError as error:
            raise PeerDeadError(f"an engine worker died: {error}", stage="rpc") from error

    def pause(self) -> None:
        """Nothing runs."""

    def invalidate(self) -> None:
        """Nothing is cached."""

    def resume(self) -> None:
        """Nothing was paused."""

    def set_version(self, version: int) -> None:
        """Nothing is generated."""

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()

    def __enter__(self) -> ProcessShard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
