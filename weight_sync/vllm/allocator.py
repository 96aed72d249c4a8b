"""vLLM's sleep-mode allocator: what it freed, and which tensors lie in its memory."""

from __future__ import annotations

import bisect
import gc
from collections.abc import Iterable

import torch
from vllm.device_allocator.cumem import CuMemAllocator


def freed_tags() -> frozenset[str] | None:
    """Tags of memory that is freed now; None if this process has no such allocator."""
    instance = CuMemAllocator.instance
    if instance is None:
        return None
    return frozenset(d.tag for d in instance.pointer_to_data.values() if d.is_asleep)


class Pool:
    """The allocations under one tag, at one moment."""

    def __init__(self, tag: str) -> None:
        instance = CuMemAllocator.instance
        data = instance.pointer_to_data if instance is not None else {}
        self._spans = sorted((p, p + d.handle[1]) for p, d in data.items() if d.tag == tag)
        self._starts = [start for start, _ in self._spans]

    def holds(self, address: int) -> bool:
        """Whether an address lies in the pool."""
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address < self._spans[at][1]

    def storages(self, but: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Storages in the pool that Python can reach and that belong to none of ``but``.

        They are found wherever they are kept: in modules, in plain attributes, in globals.

        Returns:
            Each storage once, as a 1-D uint8 tensor.
        """
        if not self._spans:
            return []
        seen = {tensor.untyped_storage().data_ptr() for tensor in but}
        found: list[torch.Tensor] = []
        for candidate in gc.get_objects():
            # By type, since asking an arbitrary object for its class may run code of its own.
            kind = type(candidate)
            if kind is not torch.Tensor and not issubclass(kind, torch.nn.Parameter):
                continue
            if not candidate.is_cuda or candidate.layout != torch.strided:
                continue
            storage = candidate.untyped_storage()
            address = storage.data_ptr()
            if address in seen or not self.holds(address):
                continue
            seen.add(address)
            whole = torch.empty(0, dtype=torch.uint8, device=candidate.device)
            found.append(whole.set_(storage))
        return found
