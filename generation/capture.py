"""Records of every generated token with the weight version it came from, and where they go."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from generation.errors import InvalidRolloutError


class VersionSpan(msgspec.Struct, frozen=True):
    """Generated tokens ``start`` to ``stop`` (exclusive) came from one weight version."""

    start: int
    stop: int
    weight_version: int


class CaptureRecord(msgspec.Struct, frozen=True):
    """One finished request.

    Attributes:
        request_id: The engine's id.
        prompt_token_ids: What the engine processed.
        generation_token_ids: What it sampled.
        generation_logprobs: Log-probability of each sampled token, finite.
        version_spans: Cover the generated tokens without gap, versions never falling.
    """

    request_id: str
    prompt_token_ids: list[int]
    generation_token_ids: list[int]
    generation_logprobs: list[float]
    version_spans: list[VersionSpan]

    def check(self) -> None:
        """Raises InvalidRolloutError when the parts do not describe one sequence."""
        tokens = len(self.generation_token_ids)
        where = f"request {self.request_id}"
        if len(self.generation_logprobs) != tokens:
            raise InvalidRolloutError(
                f"{where}: {tokens} tokens with {len(self.generation_logprobs)} logprobs"
            )
        if not all(map(math.isfinite, self.generation_logprobs)):
            raise InvalidRolloutError(f"{where}: a logprob is not finite")
        end, version = 0, None
        for span in self.version_spans:
            if span.start != end or span.stop <= span.start:
                raise InvalidRolloutError(f"{where}: version spans leave a gap at token {end}")
            if version is not None and span.weight_version <= version:
                raise InvalidRolloutError(
                    f"{where}: weight version {span.weight_version} follows {version}"
                )
            end, version = span.stop, span.weight_version
        if end != tokens:
            raise InvalidRolloutError(
                f"{where}: version spans end at token {end} of {tokens}; every token needs the "
                "version it was sampled with"
            )


def spans_of_versions(versions: Sequence[int]) -> list[VersionSpan]:
    """Groups the weight version of each token into spans of equal version."""
    spans: list[VersionSpan] = []
    start = 0
    for stop in range(1, len(versions) + 1):
        if stop == len(versions) or versions[stop] != versions[start]:
            spans.append(VersionSpan(start, stop, versions[start]))
            start = stop
    return spans


class CaptureSink(Protocol):
    """Takes finished requests; may be called from several threads."""

    def record(self, record: CaptureRecord) -> None:
        """Stores one request. Raises InvalidRolloutError when it is inconsistent."""
        ...

    def close(self) -> None:
        """Makes everything recorded durable; safe to call twice."""
        ...


class InMemorySink:
    """Keeps records until someone drains them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: list[CaptureRecord] = []

    def record(self, record: CaptureRecord) -> None:
        """Stores one request."""
        record.check()
        with self._lock:
            self._records.append(record)

    def drain(self) -> list[CaptureRecord]:
        """Returns the records so far, oldest first, and forgets them."""
        with self._lock:
            records, self._records = self._records, []
            return records

    def close(self) -> None:
        """Nothing to make durable; records stay until drained."""


class JsonLinesSink:
    """Appends one JSON object per line to a file.

    Args:
        path: The file; created when absent.
    """

    def __init__(self, path: str | Path) -> None:
        # A buffered file has its own lock, so lines of several threads do not mix.
        self._file = Path(path).open("ab")  # noqa: SIM115 - lives as long as the sink

    def record(self, record: CaptureRecord) -> None:
        """Writes one line in one write, and flushes it to the operating system.

        Raises:
            InvalidRolloutError: The record is inconsistent.
            ValueError: The sink is closed.
        """
        record.check()
        line = msgspec.json.encode(record) + b"\n"
        self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        """Flushes and closes the file."""
        self._file.close()


def read_json_lines(path: str | Path) -> Iterator[CaptureRecord]:
    """Yields the records of a :class:`JsonLinesSink` file.

    Raises:
        InvalidRolloutError: A line that is no record, such as one cut short by a crash.
    """
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield msgspec.json.decode(line, type=CaptureRecord)
            except msgspec.DecodeError as error:
                raise InvalidRolloutError(
                    f"{path} line {number} is not a capture record: {error}"
                ) from error
