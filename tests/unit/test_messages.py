"""Failures cross the wire as the same error, and messages that lie are refused."""

from __future__ import annotations

import msgspec
import pytest

from weight_sync.errors import (
    AbortedError,
    ConfigError,
    CoverageError,
    DeadlineError,
    EngineStateError,
    PeerDeadError,
    PlanMismatchError,
    QuantizationError,
    RefitError,
    ReplicaMismatchError,
    StaleEpochError,
    VerifyError,
    WeightSyncError,
)
from weight_sync.failures import to_error, to_failure
from weight_sync.messages import (
    Done,
    GetManifest,
    Release,
    decode_trainer_reply,
    decode_trainer_request,
    decode_worker_request,
    encode,
)

WHERE = {"stage": "verify", "version": 4, "epoch": 2, "ranks": ["trainer 1"]}


def across(error: BaseException) -> WeightSyncError:
    failure = decode_trainer_reply(encode(to_failure(error, "transfer")))
    return to_error(failure, "shard 0 worker 1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "kind", [RefitError, DeadlineError, VerifyError, AbortedError, PeerDeadError]
)
def test_refit_errors_keep_class_place_and_ranks(kind: type[RefitError]) -> None:
    back = across(kind("it broke", **WHERE))  # type: ignore[arg-type]
    assert type(back) is kind
    assert isinstance(back, RefitError)
    assert (back.stage, back.version, back.epoch, back.ranks) == ("verify", 4, 2, ("trainer 1",))
    assert "it broke" in str(back)
    assert "shard 0 worker 1" in str(back)


def test_a_refit_error_without_ranks_names_who_reported_it() -> None:
    back = across(VerifyError("digests differ", stage="verify"))
    assert isinstance(back, RefitError)
    assert back.ranks == ("shard 0 worker 1",)


@pytest.mark.parametrize(
    "kind",
    [
        ConfigError,
        EngineStateError,
        PlanMismatchError,
        QuantizationError,
        ReplicaMismatchError,
        StaleEpochError,
    ],
)
def test_other_errors_keep_class_and_text(kind: type[WeightSyncError]) -> None:
    back = across(kind("do this instead"))
    assert type(back) is kind
    assert "do this instead" in str(back)


def test_coverage_errors_keep_all_three_lists() -> None:
    back = across(CoverageError(["a"], ["b", "c"], ["d"]))
    assert isinstance(back, CoverageError)
    assert (back.unconsumed, back.unwritten, back.disagreeing) == (("a",), ("b", "c"), ("d",))


def test_foreign_exceptions_become_refit_errors_with_their_class_name() -> None:
    back = across(ZeroDivisionError("half of nothing"))
    assert type(back) is RefitError
    assert back.stage == "transfer"
    assert "ZeroDivisionError: half of nothing" in str(back)


@pytest.mark.parametrize("raw", [b"", b"\x00", b"not msgpack", encode(Done())])
def test_requests_that_are_none_are_refused(raw: bytes) -> None:
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        decode_trainer_request(raw)


def test_a_worker_does_not_take_requests_for_trainers() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode_worker_request(encode(GetManifest()))


def test_a_field_of_the_wrong_type_is_refused() -> None:
    raw = msgspec.msgpack.encode({"type": "Release", "version": "seven", "error": ""})
    with pytest.raises(msgspec.ValidationError, match="version"):
        decode_trainer_request(raw)
    assert decode_trainer_request(encode(Release(7, 3, ""))) == Release(7, 3, "")
