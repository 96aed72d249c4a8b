"""What a trainer rank promises about its weights, and when it may change them again."""

from __future__ import annotations

import threading

import pytest

from weight_sync.comm.deadline import Deadline
from weight_sync.errors import DeadlineError, EngineStateError, RefitError, StaleEpochError
from weight_sync.trainer.publication import Publication


@pytest.fixture
def publication() -> Publication:
    made = Publication(0)
    made.publish(5)
    return made


def soon() -> Deadline:
    return Deadline(0.05)


def test_the_end_of_another_versions_refit_ends_no_wait(publication: Publication) -> None:
    publication.end(7, 1, "nobody published 7")
    with pytest.raises(DeadlineError, match="waited"):
        publication.wait_end(5, 1, soon())


def test_a_failed_refit_ends_the_wait_with_its_reason(publication: Publication) -> None:
    publication.end(5, 1, "a worker died")
    with pytest.raises(RefitError, match="a worker died"):
        publication.wait_end(5, 1, soon())


def test_an_earlier_end_does_not_end_the_wait_for_a_later_version(
    publication: Publication,
) -> None:
    publication.end(5, 1, "")
    publication.check(6)
    publication.publish(6)
    with pytest.raises(DeadlineError):
        publication.wait_end(6, 1, soon())


def test_a_version_whose_refit_ended_is_not_served_again(publication: Publication) -> None:
    publication.end(5, 1, "a worker died")
    with pytest.raises(RefitError, match="may have changed its weights"):
        publication.wait_for(5, 1, soon())


def test_a_version_whose_refit_failed_may_be_published_again(publication: Publication) -> None:
    publication.end(5, 1, "a worker died")
    publication.check(5)
    publication.publish(5)
    publication.wait_for(5, 2, soon())


def test_a_version_that_was_installed_may_not_be_published_again(
    publication: Publication,
) -> None:
    publication.end(5, 1, "")
    with pytest.raises(EngineStateError, match="must grow"):
        publication.check(5)


def test_versions_never_go_back(publication: Publication) -> None:
    with pytest.raises(EngineStateError, match="must grow"):
        publication.check(3)


def test_a_wait_for_a_version_that_was_overtaken_says_so(publication: Publication) -> None:
    publication.publish(6)
    with pytest.raises(EngineStateError, match="newer"):
        publication.wait_end(5, 1, soon())


def test_who_waits_for_a_version_goes_on_when_it_comes(publication: Publication) -> None:
    threading.Timer(0.05, publication.publish, [6]).start()
    publication.wait_for(6, 1, Deadline(5))


def test_who_waits_for_a_version_goes_when_its_refit_ends(publication: Publication) -> None:
    """Nobody reads the answer any more, so it must not take up a thread until the deadline."""
    threading.Timer(0.05, publication.end, [6, 1, "an engine is asleep"]).start()
    with pytest.raises(RefitError, match="ended before trainer 0 published 6"):
        publication.wait_for(6, 1, Deadline(15))


def test_a_refit_that_failed_earlier_does_not_end_the_wait_of_the_next_one(
    publication: Publication,
) -> None:
    publication.end(6, 1, "an engine is asleep")
    threading.Timer(0.05, publication.publish, [6]).start()
    publication.wait_for(6, 2, Deadline(15))


def test_a_wait_that_begins_after_its_refit_ended_is_over_at_once(publication: Publication) -> None:
    """Whoever waits may be a thread that starts late."""
    publication.end(6, 1, "an engine is asleep")
    with pytest.raises(RefitError, match="ended before trainer 0 published 6"):
        publication.wait_for(6, 1, Deadline(15))


def test_a_later_epoch_ends_the_waits_of_earlier_ones(publication: Publication) -> None:
    threading.Timer(0.05, publication.overtake, [2]).start()
    with pytest.raises(StaleEpochError, match="epoch 2 began"):
        publication.wait_for(6, 1, Deadline(15))
    with pytest.raises(StaleEpochError, match="epoch 2 began"):
        publication.wait_for(5, 1, Deadline(15))
    publication.wait_for(5, 2, soon())


def test_a_version_is_ready_from_publish_until_its_refit_ends(publication: Publication) -> None:
    ready = [publication.is_at(5), publication.is_at(6)]
    publication.end(5, 1, "")
    assert [*ready, publication.is_at(5)] == [True, False, False]


def test_closing_ends_every_wait(publication: Publication) -> None:
    threading.Timer(0.05, publication.close).start()
    with pytest.raises(EngineStateError, match="closed"):
        publication.wait_for(6, 1, Deadline(20))
    with pytest.raises(EngineStateError, match="closed"):
        publication.wait_end(5, 1, Deadline(20))
