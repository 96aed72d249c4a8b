"""The Protocol of a weight source: what one trainer rank can show without moving a byte."""

from __future__ import annotations

from typing import Protocol

import torch

from weight_sync.manifest import Manifest


class WeightSource(Protocol):
    """A trainer rank's weights."""

    def manifest(self, rank: int, host: str, device: str) -> Manifest:
        """Names, dtypes, global shapes and owned regions; no data is touched.

        Raises:
            LayoutError: If the module's metadata is inconsistent.
        """
        ...

    def region(self, number: int) -> torch.Tensor:
        """The local tensor of one region of the manifest, shaped like the region (a view).

        Its dtype may differ from the manifest's wire dtype where a cast was declared.
        """
        ...

    def prepare(self) -> None:
        """Called on the trainer's own thread before weights are read, e.g. to reshard FSDP2."""
        ...

    def fingerprint(self) -> object:
        """Changes when any local tensor lies somewhere else; cheap, called every refit."""
        ...
