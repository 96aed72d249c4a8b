"""Every environment variable this library reads, each with its default and meaning."""

from __future__ import annotations

import os


def deadline_seconds() -> float:
    """``WEIGHT_SYNC_DEADLINE_S``: default deadline of a refit and of other waits, in s (120)."""
    return float(os.environ.get("WEIGHT_SYNC_DEADLINE_S", "120"))


def socket_root() -> str | None:
    """``WEIGHT_SYNC_SOCKET_DIR``: parent of the private socket directories (system temp)."""
    return os.environ.get("WEIGHT_SYNC_SOCKET_DIR") or None


def progress() -> str:
    """``WEIGHT_SYNC_PROGRESS``: ``auto`` (bar on a terminal), ``on`` or ``off``."""
    return os.environ.get("WEIGHT_SYNC_PROGRESS", "auto")
