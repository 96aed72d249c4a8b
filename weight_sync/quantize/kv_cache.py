"""KV-cache scales: which engines need them, and which values can be one.

They are per-tensor float32 numbers that a trainer calibrates; never quantized themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from weight_sync.errors import QuantizationError, shorten

# E4M3 per tensor. E5M2 has the range of half precision and takes no calibrated scale; the styles
# with a scale per token and head compute theirs when they write the cache.
_CALIBRATED = frozenset({"fp8", "fp8_e4m3"})


def requires_kv_scale_sync(kv_cache_dtype: str | None) -> bool:
    """Whether an engine with this ``kv_cache_dtype`` reads per-tensor k and v scales.

    Args:
        kv_cache_dtype: The engine's setting, e.g. ``"auto"``, ``"fp8"``, ``"fp8_per_token_head"``.
    """
    return kv_cache_dtype in _CALIBRATED


def check_kv_scales(scales: Mapping[str, float]) -> None:
    """Refuses scales that an engine would divide by zero with, or take for "not calibrated".

    Args:
        scales: Name -> scale.

    Raises:
        QuantizationError: Naming every scale that is not a positive finite float32.
    """
    wrong = [
        f"{name} = {scale}"
        for name, scale in scales.items()
        if not 2.0**-126 <= scale < 2.0**128  # NaN compares false
    ]
    if wrong:
        raise QuantizationError(
            f"KV-cache scales must be positive finite float32 numbers: {shorten(wrong)}. Calibrate "
            "them again, or leave them out to keep what the engine has"
        )
