"""Results that survive the end of a run."""

from __future__ import annotations

import json
from pathlib import Path

from bench.keep import keep


def test_the_last_result_is_in_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    keep(path, {"runs": [1], "unfinished": ["reshard"]})
    text = keep(path, {"runs": [1, 2]})
    assert json.loads(path.read_text()) == json.loads(text) == {"runs": [1, 2]}
    assert list(path.parent.iterdir()) == [path]
