"""What a trainer rank serves: its weights as they are, or what engines want quantized of them."""

from __future__ import annotations

from collections.abc import Sequence

from weight_sync.manifest import Manifest
from weight_sync.quantize.wanted import QuantSpec
from weight_sync.sources.base import WeightSource
from weight_sync.sources.quantized import QuantizedSource, ReduceMax


class Served:
    """The source in use, which changes when engines say what they want.

    Not thread-safe: the endpoint calls it under its own lock.

    Args:
        plain: The rank's weights.
        manifest: What it holds.
        reduce_max: See :class:`~weight_sync.sources.quantized.QuantizedSource`.

    Attributes:
        source: What regions are read from.
        manifest: What it holds; numbers its regions.
        plain_manifest: What the trainer itself holds.
    """

    def __init__(
        self, plain: WeightSource, manifest: Manifest, reduce_max: ReduceMax | None
    ) -> None:
        self.source: WeightSource = plain
        self.manifest = manifest
        self._plain = plain
        self.plain_manifest = manifest
        self._reduce = reduce_max
        self._wanted: tuple[QuantSpec, ...] = ()
        self._quantized: QuantizedSource | None = None
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
        """
        if tuple(wanted) == self._wanted:
            return False
        source = QuantizedSource(self._plain, wanted, reduce_max=self._reduce)
        manifest = source.adopt(self.plain_manifest)
        if wanted:
            source.compile()
        self._wanted = tuple(wanted)
        # Workers of the epoch before may still have its memory mapped.
        self._retired = self._quantized
        self._quantized = source if wanted else None
        self.source = source if wanted else self._plain
        self.manifest = manifest if wanted else self.plain_manifest
        self._version = -1
        return True

    def prepare(self, version: int) -> None:
        """On the trainer's own thread: readies the weights of a version."""
        self.source.prepare()
        self._version = version
        self._checked = False

    def ensure(self, version: int, seconds: float) -> None:
        """Before bytes of a version count: they were quantized, and could be.

        A version that was published before engines said what they want is quantized here.

        Raises:
            QuantizationError: Naming tensors with values that no format can hold.
            DeadlineError: If the device did not finish in time.
        """
        self._retired = None
        if self._quantized is None or (self._version == version and self._checked):
            return
        if self._version != version:
            self._quantized.quantize()
            self._quantized.synchronize()
            self._version = version
        self._quantized.check(seconds)
        self._checked = True

    def forget(self) -> None:
        """Gives quantized memory back, until the next version is prepared."""
        self._retired = None
        if self._quantized is not None:
            self._quantized.forget()
            self._version = -1
