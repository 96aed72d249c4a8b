"""KV-cache scales: who needs them, and which are real."""

from __future__ import annotations

import math

import pytest

from weight_sync.errors import QuantizationError
from weight_sync.quantize.kv_cache import check_kv_scales, requires_kv_scale_sync


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("fp8", True),
        ("fp8_e4m3", True),
        ("fp8_e5m2", False),
        ("fp8_per_token_head", False),
        ("int8_per_token_head", False),
        ("fp8_ds_mla", False),
        ("nvfp4", False),
        ("auto", False),
        ("bfloat16", False),
        (None, False),
    ],
)
def test_only_per_tensor_e4m3_caches_need_scales(dtype: str | None, expected: bool) -> None:
    assert requires_kv_scale_sync(dtype) is expected


def test_calibrated_scales_are_accepted() -> None:
    check_kv_scales({"l.0.k_scale": 0.02, "l.0.v_scale": 0.05, "l.1.k_scale": 1.0})


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 1e-40, 1e39])
def test_scale_that_is_no_positive_float32_is_refused_by_name(scale: float) -> None:
    with pytest.raises(QuantizationError, match=r"l\.0\.v_scale"):
        check_kv_scales({"l.0.k_scale": 0.02, "l.0.v_scale": scale})
