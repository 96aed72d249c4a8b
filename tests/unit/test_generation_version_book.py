"""Weight versions of tokens, kept outside the engine."""

from __future__ import annotations

from types import SimpleNamespace

from generation.capture import VersionSpan
from generation.version_book import VersionBook


def engine(**tokens: int) -> SimpleNamespace:
    """An engine whose running requests have so many tokens."""
    states = {
        f"{name}-internal": SimpleNamespace(
            external_req_id=name, detokenizer=SimpleNamespace(num_output_tokens=lambda n=n: n)
        )
        for name, n in tokens.items()
    }
    return SimpleNamespace(output_processor=SimpleNamespace(request_states=states))


def test_a_request_that_ran_across_switches_has_one_span_per_version():
    book = VersionBook()
    book.switch(engine(a=3), 0)
    book.switch(engine(a=5, b=2), 1)
    assert book.spans("a", 9, 2) == [
        VersionSpan(0, 3, 0),
        VersionSpan(3, 5, 1),
        VersionSpan(5, 9, 2),
    ]
    assert book.spans("b", 4, 2) == [VersionSpan(0, 2, 1), VersionSpan(2, 4, 2)]


def test_a_request_that_began_after_the_last_switch_has_one_span():
    book = VersionBook()
    book.switch(engine(), 0)
    assert book.spans("c", 4, 1) == [VersionSpan(0, 4, 1)]
    assert book.spans("c", 0, 1) == []


def test_a_switch_before_the_first_token_leaves_no_empty_span():
    book = VersionBook()
    book.switch(engine(a=0), 0)
    assert book.spans("a", 4, 1) == [VersionSpan(0, 4, 1)]


def test_a_switch_to_the_same_version_does_not_split_a_span():
    book = VersionBook()
    book.switch(engine(a=3), 1)
    assert book.spans("a", 5, 1) == [VersionSpan(0, 5, 1)]


def test_requests_that_ended_are_forgotten_at_the_next_switch():
    book = VersionBook()
    book.switch(engine(a=3), 0)
    book.switch(engine(), 1)
    assert book.spans("a", 5, 2) == [VersionSpan(0, 5, 2)]
