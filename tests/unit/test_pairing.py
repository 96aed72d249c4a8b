"""Case B34: processes that see different GPUs in different orders are paired by identity."""

from __future__ import annotations

import numpy as np
import pytest

from weight_sync.errors import ConfigError
from weight_sync.pairing import ANOTHER_HOST, SAME_DEVICE, SAME_HOST, canonical, distances, visible

UUIDS = [f"GPU-{n:08x}-1111-2222-3333-{n:012x}" for n in range(8)]
HOST = "host"


def on(host: str, *numbers: int) -> list[tuple[str, str]]:
    return [(host, UUIDS[n]) for n in numbers]


def test_each_worker_is_closest_to_the_trainer_on_its_own_gpu_whatever_the_order() -> None:
    cost = distances(on(HOST, 4, 5, 6, 7), on(HOST, 6, 7, 4, 5))
    assert cost.argmin(axis=0).tolist() == [2, 3, 0, 1]
    assert (cost == SAME_DEVICE).sum() == 4
    assert (cost == SAME_HOST).sum() == 12


def test_equal_positions_on_other_gpus_are_no_pair() -> None:
    assert (distances(on(HOST, 0, 1), on(HOST, 2, 3)) == SAME_HOST).all()


def test_the_same_uuid_on_another_host_is_far() -> None:
    cost = distances([(HOST, "cpu")], [("other", "cpu")])
    assert cost.tolist() == [[ANOTHER_HOST]]
    assert cost.dtype == np.int8


@pytest.mark.parametrize("spelling", [str.upper, str.lower, lambda u: u.removeprefix("GPU-")])
def test_spellings_of_one_uuid_are_one_gpu(spelling) -> None:
    assert canonical(spelling(UUIDS[4])) == UUIDS[4]
    assert distances([(HOST, spelling(UUIDS[4]))], on(HOST, 4)).tolist() == [[SAME_DEVICE]]


@pytest.mark.parametrize(
    "setting",
    [
        "4,5,6,7",
        ",".join(UUIDS[4:]),
        ",".join(u.removeprefix("GPU-") for u in UUIDS[4:]),
        " 4, GPU-00000005 ,6,00000007-1111",
    ],
    ids=["indices", "uuids", "bare-uuids", "mixed"],
)
def test_visible_gpus_keep_their_identity(setting: str) -> None:
    assert visible(UUIDS, setting) == tuple(UUIDS[4:])


def test_order_of_the_setting_is_the_order_of_local_indices() -> None:
    assert visible(UUIDS, "6,7,4,5") == tuple(UUIDS[n] for n in (6, 7, 4, 5))


def test_without_a_setting_all_are_visible_and_with_an_empty_one_none() -> None:
    assert visible(UUIDS, None) == tuple(UUIDS)
    assert visible(UUIDS, "") == ()


@pytest.mark.parametrize("setting", ["9", "GPU-99999999", "GPU-0000000"])
def test_an_entry_that_names_no_single_gpu_lists_wanted_and_available(setting: str) -> None:
    with pytest.raises(ConfigError) as refused:
        visible(UUIDS, f"0,{setting}")
    assert setting in str(refused.value)
    assert all(uuid in str(refused.value) for uuid in UUIDS)
