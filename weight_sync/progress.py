"""A line on the terminal for refits that take longer than a second."""

from __future__ import annotations

import sys
import threading
import time
from typing import TextIO

from weight_sync import env

_DELAY_SECONDS = 1.0
_TICK_SECONDS = 0.2
_WIDTH = 20


class Progress:
    """Shows stage and elapsed time while a refit runs.

    Args:
        what: Title, e.g. ``"refit v3"``.
        stages: Stages in order.
        stream: Where to write; nothing is written unless it is a terminal or progress is forced.
    """

    def __init__(self, what: str, stages: tuple[str, ...], stream: TextIO | None = None) -> None:
        self._what = what
        self._stages = stages
        self._stream = stream if stream is not None else sys.stderr
        setting = env.progress()
        self._on = setting == "on" or (setting == "auto" and self._stream.isatty())
        self._stage = ""
        self._start = time.monotonic()
        self._end = threading.Event()
        self._shown = False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Progress:
        if self._on:
            self._thread = threading.Thread(
                target=self._run, name="weight-sync-progress", daemon=True
            )
            self._thread.start()
        return self

    def stage(self, name: str) -> None:
        """Says which stage runs now."""
        self._stage = name

    def _run(self) -> None:
        if self._end.wait(_DELAY_SECONDS):
            return
        while not self._end.wait(_TICK_SECONDS):
            done = self._stages.index(self._stage) if self._stage in self._stages else 0
            filled = _WIDTH * done // max(len(self._stages), 1)
            bar = "#" * filled + "-" * (_WIDTH - filled)
            elapsed = time.monotonic() - self._start
            self._stream.write(f"\r{self._what} [{bar}] {self._stage:<12} {elapsed:6.1f} s")
            self._stream.flush()
            self._shown = True

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=2)
        if self._shown:
            self._stream.write("\n")
            self._stream.flush()
