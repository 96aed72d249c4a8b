"""Checkpoint names the facade must recognise, and how it lists names that do not fit."""

from __future__ import annotations

from collections.abc import Iterable

_GROUPED_MOE_EXPERT_WEIGHT_SUFFIXES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")

_NAMES_SHOWN = 8


def is_grouped_moe_expert_weight_name(name: str) -> bool:
    """Tells whether a checkpoint name is one slab that holds all experts of a layer.

    Such names carry no ``.weight`` suffix, so rules that look for one do not see them.
    """
    return name.endswith(_GROUPED_MOE_EXPERT_WEIGHT_SUFFIXES)


def _format_refit_key_error(label: str, keys: Iterable[str]) -> str:
    """Returns ``"label (n): a, b, ..."`` with at most the first eight sorted names."""
    ordered = sorted(keys)
    shown = ", ".join(ordered[:_NAMES_SHOWN])
    return f"{label} ({len(ordered)}): {shown}" + (" ..." if len(ordered) > _NAMES_SHOWN else "")
