"""An engine shard as the synchronizer sees it, and adapters for vLLM's own front ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from weight_sync.errors import CacheInvalidationError

if TYPE_CHECKING:
    from vllm import LLM


class EngineShard(Protocol):
    """One data-parallel replica of the engine.

    All methods block; the synchronizer calls them from threads of its own and never waits longer than
    its deadline.
    """

    @property
    def workers(self) -> int:
        """``tp * pp``."""
        ...

    def call(self, request: bytes) -> list[bytes]:
        """Runs one request on every worker and returns their replies in rank order."""
        ...

    def pause(self) -> None:
        """Stops scheduling; running requests stay and continue after :meth:`resume`."""
        ...

    def invalidate(self) -> None:
        """Drops every cache computed with earlier weights.

        Raises:
            CacheInvalidationError: If the engine refused.
        """
        ...

    def resume(self) -> None:
        """Goes on; idempotent."""
        ...

    def set_version(self, version: int) -> None:
        """Stamps outputs generated from now on."""
        ...


class LocalLLM:
    """vLLM's synchronous ``LLM`` in this process.

    Between calls of ``generate`` nothing runs, so there is nothing to pause; caches are dropped all
    the same.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        parallel = llm.llm_engine.vllm_config.parallel_config
        self.workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        if parallel.distributed_executor_backend == "external_launcher":
            # Every rank is a process and an LLM of its own; this one drives only itself.
            self.workers = 1

    def call(self, request: bytes) -> list[bytes]:
        """Runs a request on every worker of this LLM."""
        return list(self._llm.collective_rpc("weight_sync_call", args=(request,)))

    def pause(self) -> None:
        """Nothing runs between calls."""

    def invalidate(self) -> None:
        """Drops the prefix cache; with no request running the engine may not refuse."""
        if self._llm.reset_prefix_cache() is False:
            raise CacheInvalidationError(
                "vLLM refused to reset the prefix cache because requests are running; finish or "
                "abort them before sync_weights()"
            )

    def resume(self) -> None:
        """Nothing was paused."""

    def set_version(self, version: int) -> None:
        """Stamps outputs where this vLLM can."""
        setter = getattr(self._llm, "update_weight_version", None)
        if setter is not None:
            setter(str(version))
