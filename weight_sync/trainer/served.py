"""What a trainer rank serves: its weights as they are, or what engines want quantized of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weight_sync.env import deadline_seconds
from weight_sync.errors import QuantizationError
from weight_sync.faults import FaultHook
from weight_sync.manifest import Manifest
from weight_sync.quantize.wanted import QuantSpec
from weight_sync.sources.base import WeightSource
from weight_sync.sources.quantized import QuantizedSource, ReduceMax


class Served:
    """The source in use, which changes when engines say what they want.

    Not thread-safe but for :meth:`ensure`: the endpoint calls it under its own lock.

    Args:
        plain: The rank's weights.
        manifest: What it holds.
        reduce_max: See :class:`~weight_sync.sources.quantized.QuantizedSource`.
        fault: For fault injection in tests.

    Attributes:
        source: What regions are read from.
        quantized: The same, where it quantizes.
        manifest: What it holds; numbers its regions.
        plain_manifest: What the trainer itself holds.
    """

    def __init__(
        self,
        plain: WeightSource,
        manifest: Manifest,
        reduce_max: ReduceMax | None,
        fault: FaultHook,
    ) -> None:
        self.source: WeightSource = plain
        self.manifest = manifest
        self._plain = plain
        self.plain_manifest = manifest
        self._reduce = reduce_max
        self._fault = fault
        self._wanted: tuple[QuantSpec, ...] = ()
        self.quantized: QuantizedSource | None = None
        self._retired: QuantizedSource | None = None
        self._version = -1
        self._checked = False

    def want(self, wanted: Sequence[QuantSpec]) -> bool:
        """Serves ``wanted`` quantized from now on; returns whether regions changed.

        Memory is taken and programs are compiled here, so that what cannot be done is refused
        before anything is planned.

        Raises:
            QuantizationError: Naming the tensors that cannot be quantized as wanted.
            LayoutError: If kernels cannot read a tensor's memory.
            DeadlineError: If what was quantized before does not end.
        """
        if tuple(wanted) == self._wanted:
            return False
        source = QuantizedSource(self._plain, wanted, reduce_max=self._reduce, fault=self._fault)
        manifest = source.adopt(self.plain_manifest)
        if wanted:
            source.compile()
        if self.quantized is not None:
            self.quantized.end(deadline_seconds(), early=True)
        self._wanted = tuple(wanted)
        # Workers of the epoch before may still have its memory mapped.
        self._retired = self.quantized
        self.quantized = source if wanted else None
        self.source = source if wanted else self._plain
        self.manifest = manifest if wanted else self.plain_manifest
        self._version = -1
        return True

    def arrange(self, regions: NDArray[np.int64]) -> None:
        """Says in which order regions will be sent."""
        if self.quantized is not None:
            self.quantized.arrange(regions)

    def prepare(self) -> None:
        """On the trainer's own thread: readies its weights, and what ranks quantize together.

        After that the trainer's current stream holds all that :meth:`begin` does not.
        """
        self._version = -1
        self._plain.prepare()
        if self.quantized is not None:
            self.quantized.ready()

    def begin(self, version: int) -> None:
        """Begins to quantize a version that was prepared; returns at once."""
        if self.quantized is not None:
            self.quantized.start()
        self._version = version
        self._checked = False

    def start(self, version: int) -> None:
        """Begins to quantize a version that was published before engines said what they want.

        Raises:
            QuantizationError: If ranks quantize it together: each does so on the thread that
                publishes, where its collectives have their order, and none waits in here.
        """
        self._retired = None
        if self.quantized is not None and self._version != version:
            if self.quantized.together:
                raise QuantizationError(
                    f"version {version} was published before engines said that they want FP8 with "
                    "one scale per matrix, or its quantized memory was given back; ranks find such "
                    "scales together while they publish. publish() it again on every rank, then "
                    "refit; call init_communicator() before the first publish() to avoid this"
                )
            self.quantized.ready()
            self.quantized.synchronize()
            self.begin(version)

    def ensure(self, version: int, seconds: float) -> None:
        """Before bytes of a started version count: all are quantized, and could be.

        Raises:
            QuantizationError: Naming tensors with values that no format can hold.
            DeadlineError: If the device did not finish in time.
        """
        if self.quantized is None or (self._version == version and self._checked):
            return
        self.quantized.check(seconds)
        self._checked = True

    def settle(self, seconds: float) -> None:
        """Waits until memory is no longer written.

        Raises:
            DeadlineError: If the device did not finish in time.
        """
        if self.quantized is not None:
            self.quantized.end(seconds)

    def forget(self) -> None:
        """Gives quantized memory back, until the next version is prepared."""
        self._retired = None
        if self.quantized is not None:
            self.quantized.forget()
            self._version = -1
