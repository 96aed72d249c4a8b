"""Flat metric dicts in Prometheus' text exposition format, version 0.0.4."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ILLEGAL = re.compile(r"[^a-zA-Z0-9_:]")
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def prometheus_text(metrics: Mapping[str, float], labels: Mapping[str, str] | None = None) -> str:
    """Renders every metric as a gauge with the same labels, in name order.

    Characters that names may not hold become ``_``.

    Raises:
        ValueError: Two names that become the same, so that one would hide the other.
    """
    tags = ",".join(
        f'{_name(key)}="{value.translate(_ESCAPES)}"'
        for key, value in sorted((labels or {}).items())
    )
    seen: dict[str, str] = {}
    lines: list[str] = []
    for original, value in sorted(metrics.items()):
        name = _name(original)
        if name in seen:
            raise ValueError(f"metrics {seen[name]!r} and {original!r} are both named {name}")
        seen[name] = original
        lines.append(f"# TYPE {name} gauge")
        lines.append(f"{name}{{{tags}}} {_number(value)}" if tags else f"{name} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def _name(text: str) -> str:
    name = _ILLEGAL.sub("_", text)
    return f"_{name}" if name[:1].isdigit() else name


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))
