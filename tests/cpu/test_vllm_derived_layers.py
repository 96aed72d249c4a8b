"""Cases B16, B20 and B22: layers that derive, repack, compute or share after loading."""

from __future__ import annotations

import pytest
import torch

from tests.harness.contract import prepare
from tests.harness.layer_case import LayerCase
from tests.harness.local import LocalTrainers
from weight_sync.errors import RefitError

pytestmark = pytest.mark.timeout(60)

SCALED = {"layer.weight": (8, 8), "layer.scale": (8,)}
LATENT = {"layer.kv_b_proj.weight": (16, 8)}
BLOCKED = {f"layer.experts.{e}.{half}": (32, 64) for e in range(8) for half in ("gate", "up")} | {
    "norm.weight": (4,)
}
RECURRENT = {"layer.A_log": (8,), "layer.D": (8,), "layer.dt_bias": (8,)}
SHARING = {"layer.gate.weight": (64, 4), "layer.gate.bias": (64,), "layer.experts.weight": (64, 4)}


@pytest.mark.parametrize(("kind", "names"), [("scaled", SCALED), ("latent", LATENT)])
def test_b16_derived_copies_follow_every_sync_at_their_old_addresses(
    kind: str, names: dict[str, tuple[int, ...]]
) -> None:
    with LayerCase(kind, names) as case:
        addresses = case.ask("addresses")
        for seed in (1, 2, 0):
            case.sync(seed)
            case.expect_fresh(seed)
        assert case.ask("addresses") == addresses


@pytest.mark.parametrize(("kind", "names"), [("scaled", SCALED), ("latent", LATENT)])
def test_b16_processing_unchanged_weights_again_changes_no_byte_and_no_address(
    kind: str, names: dict[str, tuple[int, ...]]
) -> None:
    with LayerCase(kind, names) as case:
        case.sync(1)
        before = case.ask("dump"), case.ask("addresses")
        case.ask("process_again", 3)
        assert (case.ask("dump"), case.ask("addresses")) == before


def test_b20_one_way_layouts_survive_three_syncs_in_many_buckets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare("ipc-staged", monkeypatch)
    # 16 tensors of 8 KiB: an expert's gate and up lie in different buckets.
    with LayerCase("blocked", BLOCKED, bucket_bytes=24 << 10) as case:
        for number, seed in enumerate((1, 2, 3), 1):
            case.sync(seed)
            case.expect_fresh(seed)
            assert case.ask("finishes") == ["Blocked"] * number


def test_b20_a_sync_that_dies_between_buckets_leaves_the_engine_stale_and_loadable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare("ipc-staged", monkeypatch)
    with LayerCase("blocked", BLOCKED, bucket_bytes=24 << 10) as case:
        case.sync(1)
        before = case.ask("dump")
        break_after_bucket(case.trainers, 3)
        with pytest.raises(RefitError, match="disk on fire"):
            case.sync(2)
        assert case.synchronizer.is_stale
        assert case.synchronizer.shard_versions == (-1,)
        # The repacked layer itself was put back whole: no half-filled layout is ever live.
        assert case.ask("dump")["layer.w13"] == before["layer.w13"]
        case.sync(3)
        assert not case.synchronizer.is_stale
        case.expect_fresh(3)


def break_after_bucket(trainers: LocalTrainers, number: int) -> None:
    """The trainer fails once when it is asked for one bucket."""
    endpoint = trainers.endpoints[0]
    usual, broken = endpoint._stage, []

    def stage(*args: object) -> object:
        if args[-1] == number and not broken:
            broken.append(number)
            raise OSError("disk on fire")
        return usual(*args)

    endpoint._stage = stage  # type: ignore[method-assign]


def test_b22_a_parameter_computed_while_loading_is_computed_once() -> None:
    with LayerCase("recurrent", RECURRENT) as case:
        for seed in (1, 2):
            case.sync(seed)
            full = case.checkpoint(seed)
            assert torch.equal(
                torch.tensor(case.ask("value", "layer.A")), -full["layer.A_log"].exp()
            )
            assert case.ask("value", "layer.D") == full["layer.D"].tolist()
            assert case.ask("value", "layer.dt_bias") == full["layer.dt_bias"].tolist()
            case.expect_fresh(seed)


def test_b22_runtime_state_that_is_not_in_the_stream_keeps_its_bits() -> None:
    with LayerCase("recurrent", RECURRENT) as case:
        case.sync(1)
        assert case.ask("value", "layer.root_size") == [0.018798828125]


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 512])
def test_b22_a_bias_that_two_modules_share_is_sent_once_and_completes_both(
    monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    prepare("ipc-staged", monkeypatch)
    with LayerCase("sharing", SHARING, bucket_bytes=bucket_bytes) as case:
        for seed in (1, 2):
            case.sync(seed)
            case.expect_fresh(seed)
        addresses = case.ask("addresses")
        assert addresses["layer.gate.bias"] == addresses["layer.experts.bias"]
