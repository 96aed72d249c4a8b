"""Keeps results in a file, also those of a run that is ended before it is done."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def keep(path: Path | None, result: Mapping[str, object]) -> str:
    """Writes a result as JSON, in the place of an earlier one; returns its text.

    Args:
        path: Where to write; None only makes the text.
        result: What to write.
    """
    text = json.dumps(result, indent=2)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # At once or not at all: whoever ends the run may do so now.
        fresh = path.with_name(path.name + ".new")
        fresh.write_text(text + "\n")
        fresh.replace(path)
    return text
