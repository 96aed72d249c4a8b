"""Lets one vLLM worker take weights from this library and from checkpoint-engine."""

from __future__ import annotations

from checkpoint_engine.worker import VllmColocateWorkerExtension

from weight_sync.vllm.worker_extension import WeightSyncExtension


class BothExtensions(WeightSyncExtension, VllmColocateWorkerExtension):
    """vLLM takes one extension class; the two have no method in common."""
