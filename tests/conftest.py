"""Set-up shared by all tests: what vLLM reads on import, and which machine a test needs."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Before any test module imports torch or vLLM. Tests share few cores with whatever else runs there,
# so threads are few and sleep while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests by their folder and skips those that need more GPUs than there are."""
    for item in items:
        folder = item.path.relative_to(config.rootpath).parts[1]
        if folder in ("gpu", "multi_gpu"):
            item.add_marker(getattr(pytest.mark, folder))
    needs = {"gpu": 1, "multi_gpu": 2}
    asked = [mark for mark in needs if any(i.get_closest_marker(mark) for i in items)]
    if not asked:
        return
    import torch

    here = torch.cuda.device_count()
    for item in items:
        for mark in asked:
            if item.get_closest_marker(mark) and here < needs[mark]:
                reason = f"needs {needs[mark]} CUDA devices, this machine has {here}"
                item.add_marker(pytest.mark.skip(reason=reason))


# How long one example takes depends on the machine's other work, which no property is about.
settings.register_profile("weight_sync", deadline=None)
settings.load_profile("weight_sync")
