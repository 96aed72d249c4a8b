"""A worker actor of the facade whose engine also tells what its weights are, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from generation.async_actor import AsyncEngineActor

if TYPE_CHECKING:
    # Imports vLLM, which an actor must not before it knows its devices.
    from tests.harness.dumps import Dump
    from tests.harness.gpu_engines import Bits

#: Of ``generation.settings.GENERATION_WORKER_OVERRIDES``, for fleets with a ``quant_cfg``.
OBSERVED = {"generation.async_actor.AsyncEngineActor": f"{__name__}.ObservedActor"}


class ObservedActor(AsyncEngineActor):
    """The product's actor with another worker extension, and methods that ask it."""

    def arguments(self, device_ids: list[str]) -> dict[str, Any]:
        return {
            **super().arguments(device_ids),
            "worker_extension_cls": "tests.harness.gpu_engines.ObservedExtension",
        }

    async def observed_bits(self) -> list[Bits]:
        """Digests of all parameters and buffers of every worker, in rank order."""
        return list(await self._bounded(self._engine.collective_rpc("observed_bits")))

    async def observed_dump(self) -> list[Dump]:
        """What the weights of every worker are on CPU, in rank order."""
        return list(await self._bounded(self._engine.collective_rpc("observed_dump")))
