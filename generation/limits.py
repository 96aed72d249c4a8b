"""How long the facade waits for each kind of call; nothing waits without one of these."""

from __future__ import annotations

import dataclasses

from generation.errors import GenerationConfigError


@dataclasses.dataclass(frozen=True)
class Limits:
    """Deadlines in seconds, all above 0.

    Attributes:
        placement_s: Until the cluster has granted every placement group.
        load_s: Loading one engine, weights and warm-up included.
        call_s: A short call: pausing, caches, versions, metrics, sleep.
        batch_s: One synchronous batch.
        request_s: One asynchronous request, from its dispatch to its last token.
        refit_s: One refit.
        shutdown_s: Ending one engine before it is killed.
    """

    placement_s: float = 300.0
    load_s: float = 1800.0
    call_s: float = 120.0
    batch_s: float = 3600.0
    request_s: float = 900.0
    refit_s: float = 300.0
    shutdown_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises GenerationConfigError listing every deadline that is not above 0."""
        wrong = [
            f"{field.name} must be above 0 seconds, got {getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if not getattr(self, field.name) > 0
        ]
        if wrong:
            raise GenerationConfigError("limits", wrong)
