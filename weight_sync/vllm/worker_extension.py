"""What vLLM mixes into its workers:
``worker_extension_cls="weight_sync.vllm.worker_extension.WeightSyncExtension"``.

One method takes an encoded request and returns an encoded reply. It never raises and is never
called with a timeout: vLLM's replies are untagged, so either would shift every later reply.
"""

from __future__ import annotations

import torch

from weight_sync.vllm.model import VllmModel
from weight_sync.vllm.sleep import SleepGuard
from weight_sync.worker.agent import WorkerAgent

EXTENSION = "weight_sync.vllm.worker_extension.WeightSyncExtension"


class WeightSyncExtension:
    """Mixin for vLLM workers; the attributes it uses are vLLM's own."""

    def weight_sync_call(self, request: bytes) -> bytes:
        """Answers one refit request on the worker's main thread."""
        agent = self.__dict__.get("_weight_sync_agent")
        runner = self.model_runner  # type: ignore[attr-defined]
        if agent is None or self.__dict__["_weight_sync_model"] is not runner.model:
            device = torch.device(self.device)  # type: ignore[attr-defined]
            model = VllmModel(runner.model, self.vllm_config, device)  # type: ignore[attr-defined]
            parallel = self.vllm_config.parallel_config  # type: ignore[attr-defined]
            shard_size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
            guard = self.__dict__.get("_weight_sync_sleep")
            if guard is None:
                guard = self.__dict__["_weight_sync_sleep"] = SleepGuard(self)
            agent = WorkerAgent(model, self.rank % shard_size, sleep=guard)  # type: ignore[attr-defined]
            self.__dict__["_weight_sync_agent"] = agent
            self.__dict__["_weight_sync_model"] = runner.model
        return agent.handle(request)
