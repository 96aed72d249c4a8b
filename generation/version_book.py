"""Weight versions of tokens for engines that report none: who was at which token at a switch.

vLLM before 0.32 knows no weight versions. A version changes only while the engine stands still and
all of its outputs were delivered, so the number of tokens of each running request is exact then.
"""

from __future__ import annotations

from typing import Any

from generation.capture import VersionSpan


class VersionBook:
    """Notes every change of version with the requests that run across it."""

    def __init__(self) -> None:
        self._switches: dict[str, list[tuple[int, int]]] = {}

    def switch(self, engine: Any, old: int) -> None:  # noqa: ANN401 - vLLM's AsyncLLM
        """Notes that the tokens so far of every running request came from version ``old``."""
        running: dict[str, list[tuple[int, int]]] = {}
        for name, state in engine.output_processor.request_states.items():
            known = self._switches.get(_name(name, state), [])
            tokens = state.detokenizer.num_output_tokens() if state.detokenizer else 0
            running[_name(name, state)] = [*known, (tokens, old)]
        # Requests that ended in between are not asked for any more.
        self._switches = running

    def spans(self, request_id: str, tokens: int, current: int) -> list[VersionSpan]:
        """Returns the versions of a finished request's ``tokens`` tokens."""
        found: list[VersionSpan] = []
        start = 0
        for stop, version in [*self._switches.pop(request_id, []), (tokens, current)]:
            if stop > start:
                if found and found[-1].weight_version == version:
                    found[-1] = VersionSpan(found[-1].start, stop, version)
                else:
                    found.append(VersionSpan(start, stop, version))
                start = stop
        return found


def _name(internal: str, state: Any) -> str:  # noqa: ANN401 - vLLM's class
    """The id that a request was added with; newer engines add a suffix of their own."""
    return getattr(state, "external_req_id", None) or internal
