"""Declared dtype casts: which dtype a tensor has on the wire.

Nothing is cast unless the trainer says so: a router bias that lost bits on the way changes which
experts are chosen, and no later check could tell. Casts are between float types only.
"""

from __future__ import annotations

from collections.abc import Mapping

from weight_sync.dtypes import CASTABLE
from weight_sync.errors import ConfigError


def check_casts(casts: Mapping[str, str]) -> dict[str, str]:
    """Copies the declared casts after checking their targets.

    Args:
        casts: Checkpoint name or ``prefix*`` -> dtype name on the wire.

    Raises:
        ConfigError: If a target is no float type that can be cast to.
    """
    wrong = sorted(f"{name} -> {dtype}" for name, dtype in casts.items() if dtype not in CASTABLE)
    if wrong:
        raise ConfigError(
            f"casts {', '.join(wrong)} are not possible; targets are {', '.join(sorted(CASTABLE))}"
        )
    return dict(casts)


def wire_dtype(name: str, dtype: str, casts: Mapping[str, str]) -> str:
    """The dtype of one tensor on the wire.

    An exact name wins over prefixes, and a longer prefix over a shorter one. Prefixes leave tensors
    alone that are no castable float, so ``"*"`` does not touch integer buffers.

    Args:
        name: Checkpoint name.
        dtype: torch dtype name of the trainer's tensor.
        casts: What :func:`check_casts` returned.

    Raises:
        ConfigError: If a cast names this tensor and its dtype cannot be cast.
    """
    if name in casts:
        if dtype not in CASTABLE and casts[name] != dtype:
            raise ConfigError(
                f"{name} is {dtype} and cannot be cast to {casts[name]}; remove its cast, only "
                f"{', '.join(sorted(CASTABLE))} can be cast"
            )
        return casts[name]
    if dtype not in CASTABLE:
        return dtype
    prefixes = [p for p in casts if p.endswith("*") and name.startswith(p[:-1])]
    return casts[max(prefixes, key=len)] if prefixes else dtype
