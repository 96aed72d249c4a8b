"""The oracle of every bit comparison: a fresh engine that loaded a version from disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from bench.models import Config, config, random_weights, write_checkpoint
from tests.harness.dumps import Dump, differences
from tests.harness.engines import Engine, EngineRank, Generated


@dataclass(frozen=True)
class Truth:
    """What a fresh engine is: one dump per worker, and what it generates."""

    dumps: list[Dump]
    generated: Generated

    def differences(self, engine: Engine) -> list[list[str]]:
        """Names per worker whose bits differ in a running engine."""
        return [differences(a, b) for a, b in zip(engine.dump(), self.dumps, strict=True)]


class Oracle:
    """Starts each fresh engine once and remembers it.

    Args:
        folder: Where checkpoints are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[Path, int, type], Truth] = {}

    def checkpoint(self, key: str, cfg: Config, weights: dict[str, torch.Tensor]) -> Path:
        """Writes a checkpoint once and returns its folder."""
        folder = self._folder / key
        if not folder.exists():
            plain = {n: t.to(torch.bfloat16) for n, t in weights.items()}
            write_checkpoint(cfg, plain, folder)
        return folder

    def random(self, model: str, seed: int) -> Path:
        """A checkpoint of a named model with the weights trainers call version ``seed``."""
        cfg = config(model)
        return self.checkpoint(f"{model}-{seed}", cfg, random_weights(cfg, 1000 + seed))

    def truth(self, folder: Path, tp: int, rank_class: type[EngineRank] = EngineRank) -> Truth:
        """What an engine of ``tp`` workers makes of a checkpoint."""
        key = (folder, tp, rank_class)
        if key not in self._known:
            with Engine(folder, tp, rank_class) as engine:
                engine.ready()
                self._known[key] = Truth(engine.dump(), engine.generate())
        return self._known[key]
