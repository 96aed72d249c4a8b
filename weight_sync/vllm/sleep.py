"""Keeps what refits do not bring across vLLM's sleep, and knows when weights may not be touched.

Level 1 moves weights to host memory and back. Level 2 drops them: a refit brings back what it
writes, vLLM itself restores registered buffers, and the rest (tensors in plain attributes or
globals, parameters that are not trained) is saved here. vLLM 0.26 also sets calibrated KV-cache
scales to 1 when the KV cache wakes, perhaps after the refit; they get their values again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weight_sync.errors import EngineStateError, shorten
from weight_sync.recording import Recording
from weight_sync.vllm.allocator import Pool, freed_tags
from weight_sync.worker.sleep import WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Iterator

KV_CACHE = "kv_cache"
_SCALES = ("_k_scale", "_v_scale", "_q_scale", "_prob_scale", "k_scale", "v_scale")


class SleepGuard:
    """Stands before ``sleep`` and ``wake_up`` of one vLLM worker.

    Args:
        worker: The worker. Its class cannot be changed by an extension, so this object's methods
            are put into the instance.
    """

    def __init__(self, worker: Any) -> None:  # noqa: ANN401
        self._worker = worker
        self._known: frozenset[str] = frozenset()
        self._discarded = False
        self._written: frozenset[str] | None = None
        self._saved: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lost: frozenset[str] = frozenset()
        self._scales: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._sleep, self._wake_up = worker.sleep, worker.wake_up
        worker.sleep, worker.wake_up = self.sleep, self.wake_up

    @property
    def asleep(self) -> frozenset[str]:
        """What vLLM's allocator freed; where there is none, what vLLM was told to free."""
        freed = freed_tags()
        return self._known if freed is None else freed

    @property
    def discarded(self) -> bool:
        """Whether weights lost their values since the last full refit."""
        return self._discarded

    def recorded(self, recording: Recording) -> None:
        """Learns which parameters refits write.

        Raises:
            EngineStateError: If parameters were discarded that refits do not write.
        """
        units = {unit.name for unit in recording.units if unit.mode != "direct"}
        written = {parameter.name for parameter in recording.parameters}
        model = self._model
        for name, _ in model.named_parameters(remove_duplicate=False):
            if name.rpartition(".")[0] in units:
                written.add(name)
        addresses = {p.data_ptr() for n, p in model.named_parameters() if n in written}
        written |= {n for n, p in model.named_parameters() if p.data_ptr() in addresses}
        gone = self._lost - written if self._discarded else frozenset()
        if gone:
            raise EngineStateError(
                f"sleep level 2 discarded {len(gone)} parameters that refits do not write: "
                f"{shorten(gone)}. Start the engine again and refit it once before it sleeps, then "
                "they are kept; or use sleep level 1"
            )
        self._written = frozenset(written)

    def installed(self) -> None:
        """A full refit ended."""
        self._discarded = False

    @property
    def _model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._worker.model_runner.model
        return model

    # --- in place of the worker's methods -------------------------------------------------------

    def sleep(self, level: int = 1) -> None:
        """Saves what level 2 would lose, then sleeps."""
        if level >= 1 and WEIGHTS not in self.asleep:
            self._scales = [(t, t.to("cpu", copy=True)) for t in self._scale_tensors()]
            if level >= 2:
                self._save()
        self._sleep(level=level)
        if level >= 1:
            self._known = frozenset({WEIGHTS, KV_CACHE})
            self._discarded = self._discarded or level >= 2

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Wakes, then puts back what was saved."""
        before = self.asleep
        if WEIGHTS not in before:
            # A refit may have brought new scales since.
            self._scales = [(t, t.to("cpu", copy=True)) for t in self._scale_tensors()]
        waking = before if tags is None else before & frozenset(tags)
        # vLLM 0.26 restores buffers on any wake, even into weights that stay asleep.
        buffers = getattr(self._worker, "_sleep_saved_buffers", {})
        if WEIGHTS in before - waking:
            self._worker._sleep_saved_buffers = {}
        self._wake_up(tags=tags)
        if WEIGHTS in before - waking:
            self._worker._sleep_saved_buffers = buffers
        self._known = before - waking
        if WEIGHTS in waking and self._discarded:
            self._restore()
        if WEIGHTS not in self.asleep:
            for scale, value in self._scales:
                scale.copy_(value)

    @torch.no_grad()
    def _save(self) -> None:
        """Copies to the host what neither a refit nor vLLM brings back."""
        model = self._model
        parameters = dict(model.named_parameters())
        written = self._written if self._written is not None else frozenset(parameters)
        # Without a recording it is not known what a refit would write.
        self._lost = frozenset() if self._written is not None else frozenset(parameters)
        handled = [*(p for n, p in parameters.items() if n in written), *model.buffers()]
        self._saved = [(t, t.to("cpu", copy=True)) for t in Pool(WEIGHTS).storages(handled)]

    @torch.no_grad()
    def _restore(self) -> None:
        pool = Pool(WEIGHTS)
        for parameter in self._model.parameters():
            if pool.holds(parameter.data_ptr()):
                # What loaders leave alone (padding) is zero, as they leave it.
                parameter.zero_()
        for tensor, value in self._saved:
            tensor.copy_(value)
        self._saved = []

    def _scale_tensors(self) -> Iterator[torch.Tensor]:
        for module in self._model.modules():
            for name in _SCALES:
                scale = getattr(module, name, None)
                if isinstance(scale, torch.Tensor) and not scale.is_meta:
                    yield scale.detach()
