"""An engine shard as the synchronizer sees it, and adapters for vLLM's own front ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from weight_sync.errors import CacheInvalidationError, ConfigError, EngineStateError
from weight_sync.failures import to_error
from weight_sync.messages import Failure, Status, WorkerState, decode_worker_reply, encode

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


class EngineShard(Protocol):
    """One data-parallel replica of the engine.

    All methods block; the synchronizer calls them from threads of its own and never waits longer
    than its deadline. Threads are used again, for other shards too: a method leaves what belongs to
    one, such as its current CUDA device or event loop, as it found it.
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


@runtime_checkable
class CachesApart(Protocol):
    """What an :class:`EngineShard` offers besides if its caches are kept apart from its workers.

    Attributes:
        caches_apart: Whether ``invalidate()`` may run while ``call()`` does, because neither uses
            anything that the other one does.
    """

    @property
    def caches_apart(self) -> bool:
        """See above."""
        ...


def read_states(replies: Sequence[bytes]) -> list[WorkerState]:
    """What the workers of a shard say of themselves, from their replies to ``Status``.

    Raises:
        WeightSyncError: If a worker failed.
    """
    states = []
    for worker, raw in enumerate(replies):
        reply = decode_worker_reply(raw)
        if isinstance(reply, Failure):
            raise to_error(reply, f"worker {worker}")
        assert isinstance(reply, WorkerState)
        states.append(reply)
    return states


class LocalLLM:
    """vLLM's synchronous ``LLM`` in this process.

    Between calls of ``generate`` nothing runs, so there is nothing to pause; caches are dropped all
    the same. For that reason nobody may generate while ``sync_weights()`` runs. Generate through
    :meth:`generate` where the engine sleeps: ``LLM.generate`` itself waits for ever while memory is
    asleep, and answers with whatever lies in discarded weights.

    Args:
        llm: An engine started with ``EXTENSION`` of ``weight_sync.vllm.worker_extension`` as its
            ``worker_extension_cls``.

    Raises:
        ConfigError: If it was started without.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        parallel = llm.llm_engine.vllm_config.parallel_config
        self.workers = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        if parallel.distributed_executor_backend == "external_launcher":
            # Every rank is a process and an LLM of its own; this one drives only itself.
            self.workers = 1
        # In this process the scheduler is an object that workers never see. An engine in a process
        # of its own has one socket for all calls, which takes one caller at a time.
        self.caches_apart = hasattr(
            getattr(llm.llm_engine.engine_core, "engine_core", None), "scheduler"
        )
        # From here on the workers also keep, across sleep, what refits do not bring.
        self.states()

    def call(self, request: bytes) -> list[bytes]:
        """Runs a request on every worker of this LLM."""
        return list(self._llm.collective_rpc("weight_sync_call", args=(request,)))

    def states(self) -> list[WorkerState]:
        """What each worker says of itself, in rank order."""
        try:
            replies = self.call(encode(Status()))
        except Exception as error:
            if "weight_sync_call" not in str(error):
                raise
            raise ConfigError(
                "this engine knows no refits; start it with worker_extension_cls="
                "weight_sync.vllm.worker_extension.EXTENSION"
            ) from error
        return read_states(replies)

    def generate(self, *args: Any, **options: Any) -> Sequence[RequestOutput]:  # noqa: ANN401
        """``LLM.generate``, refused while it could not answer with whole weights.

        Raises:
            EngineStateError: If memory is asleep, weights are discarded, or a refit did not end.
        """
        states = self.states()
        asleep = sorted({kind for state in states for kind in state.asleep})
        if asleep:
            raise EngineStateError(
                f"the engine cannot generate: {' and '.join(asleep)} asleep; call wake_up() first"
            )
        if any(state.discarded for state in states):
            raise EngineStateError(
                "the engine cannot generate: sleep level 2 discarded its weights and no refit has "
                "brought them back; call sync_weights() first"
            )
        if any(state.torn for state in states) or len({state.version for state in states}) > 1:
            raise EngineStateError(
                "the engine cannot generate: a refit failed half-way and left mixed weights; call "
                "sync_weights() again first"
            )
        return self._llm.generate(*args, **options)

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
