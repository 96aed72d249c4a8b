"""The seam through which tests make a participant fail at a chosen place."""

from __future__ import annotations

from typing import Protocol


class FaultHook(Protocol):
    """Called where a refit could fail; a test's hook may raise, sleep, stop or kill."""

    def __call__(self, stage: str, offset: int = 0) -> None:
        """Does nothing, or fails.

        Args:
            stage: What begins, e.g. ``"connect"`` or ``"transfer"``.
            offset: Bytes of this participant's own part that were launched before, in
                ``"transfer"``, or made before, in ``"quantize"``.
        """
        ...


def no_fault(stage: str, offset: int = 0) -> None:
    """The hook of everything that is not under test."""
