"""A trainer rank's place in a Megatron-style grid of parallel groups.

Ranks are numbered as Megatron-Core does by default: for dense layers tensor parallel ranks are
neighbours, then data parallel, then pipeline stages; for expert layers expert tensor parallel ranks
are neighbours, then expert parallel, then expert data parallel, then the same pipeline stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from weight_sync.errors import LayoutError


@dataclass(frozen=True)
class Axis:
    """A rank's place along one kind of parallelism."""

    size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise LayoutError(f"rank {self.rank} does not exist in a group of {self.size}")


WHOLE = Axis()


@dataclass(frozen=True)
class ParallelGrid:
    """All groups of one trainer rank.

    Attributes:
        tp: Tensor parallel.
        pp: Pipeline stages.
        vpp: Virtual stages (model chunks) per pipeline stage.
        ep: Expert parallel.
        etp: Expert tensor parallel.
        dp: Data parallel replicas of dense layers.
    """

    tp: Axis = WHOLE
    pp: Axis = WHOLE
    vpp: int = 1
    ep: Axis = WHOLE
    etp: Axis = WHOLE
    dp: Axis = WHOLE

    @classmethod
    def of_rank(
        cls,
        rank: int,
        *,
        tp: int = 1,
        pp: int = 1,
        vpp: int = 1,
        ep: int = 1,
        etp: int = 1,
        dp: int = 1,
    ) -> ParallelGrid:
        """The place of a global rank among ``tp * dp * pp`` ranks in Megatron's default order.

        Raises:
            LayoutError: If the rank does not exist or ``ep * etp`` does not divide ``tp * dp``.
        """
        stage = tp * dp
        if stage % (ep * etp):
            raise LayoutError(
                f"ep * etp = {ep * etp} must divide tp * dp = {stage}, the ranks of one stage"
            )
        if not 0 <= rank < stage * pp:
            raise LayoutError(f"rank {rank} does not exist among tp * dp * pp = {stage * pp} ranks")
        position, inside = divmod(rank, stage)
        return cls(
            tp=Axis(tp, inside % tp),
            pp=Axis(pp, position),
            vpp=vpp,
            ep=Axis(ep, inside // etp % ep),
            etp=Axis(etp, inside % etp),
            dp=Axis(dp, inside // tp),
        )

    def layers(self, count: int, chunk: int = 0) -> range:
        """Global numbers of the layers in one model chunk of this rank, split evenly over stages.

        Chunk ``v`` of stage ``p`` holds the layers from ``(v * pp + p) * layers per chunk`` on, so
        virtual stages interleave.

        Args:
            count: Layers of the whole model.
            chunk: Model chunk, below ``vpp``.

        Raises:
            LayoutError: If layers do not divide over stages; number them yourself then.
        """
        parts = self.pp.size * self.vpp
        if count % parts or not 0 <= chunk < self.vpp:
            raise LayoutError(
                f"{count} layers over pp={self.pp.size}, vpp={self.vpp} (chunk {chunk}) do not "
                "divide evenly; give the global layer numbers of this rank explicitly"
            )
        length = count // parts
        start = (chunk * self.pp.size + self.pp.rank) * length
        return range(start, start + length)

    def describe(self) -> str:
        """How errors name this rank."""
        axes = (("tp", self.tp), ("pp", self.pp), ("ep", self.ep), ("etp", self.etp))
        return " ".join(f"{name}={axis.rank}/{axis.size}" for name, axis in axes)
