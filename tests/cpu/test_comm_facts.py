"""Ranks whose machines do not fit are refused with a table, before a group is built."""

from __future__ import annotations

import itertools

import pytest
import torch

from weight_sync.comm.facts import (
    COMPARED_SETTINGS,
    EnvironmentFacts,
    compare_environments,
    connection_hints,
    gather_facts,
    table,
)
from weight_sync.errors import EnvironmentUnsupportedError


def gpu(name: str, uuid: str, version: int = 22809, **settings: str | None) -> EnvironmentFacts:
    return EnvironmentFacts(name, "host-a", "nccl", version, uuid, settings)


@pytest.mark.parametrize("value", [None, "0", "1"])
@pytest.mark.parametrize("setting", COMPARED_SETTINGS)
def test_ranks_that_agree_are_accepted(setting: str, value: str | None) -> None:
    compare_environments([gpu(f"trainer {n}", f"GPU-{n}", **{setting: value}) for n in range(3)])


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations([None, "0", "1"], 2)))
@pytest.mark.parametrize("setting", COMPARED_SETTINGS)
def test_ranks_that_differ_in_a_setting_are_refused_with_both_values(
    setting: str, one: str | None, other: str | None
) -> None:
    facts = [gpu("trainer 0", "GPU-0", **{setting: one}), gpu("w", "GPU-1", **{setting: other})]
    with pytest.raises(EnvironmentUnsupportedError, match=f"differ in {setting}") as refused:
        compare_environments(facts)
    rows = str(refused.value).splitlines()[-2:]
    column = 5 + COMPARED_SETTINGS.index(setting)
    cells = [row.replace("trainer 0", "trainer-0").split()[column] for row in rows]
    assert cells == ["unset" if value is None else value for value in (one, other)]


def test_ranks_with_different_nccl_versions_are_refused() -> None:
    facts = [gpu("trainer 0", "GPU-0", 22809), gpu("trainer 1", "GPU-1", 22703)]
    with pytest.raises(EnvironmentUnsupportedError, match="differ in nccl") as refused:
        compare_environments(facts)
    assert "22703" in str(refused.value)


def test_two_ranks_on_one_gpu_are_refused_by_uuid() -> None:
    facts = [gpu("trainer 0", "GPU-7"), gpu("shard 0 worker 0", "GPU-7"), gpu("t", "GPU-8")]
    with pytest.raises(EnvironmentUnsupportedError) as refused:
        compare_environments(facts)
    assert "trainer 0 and shard 0 worker 0 use the same GPU GPU-7" in str(refused.value)


def test_a_cpu_rank_among_gpu_ranks_is_refused() -> None:
    facts = [gpu("trainer 0", "GPU-0"), gather_facts("trainer 1", torch.device("cpu"))]
    with pytest.raises(EnvironmentUnsupportedError, match="differ in backend"):
        compare_environments(facts)


def test_cpu_ranks_ignore_the_settings_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = gather_facts("trainer 0", torch.device("cpu"))
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    compare_environments([plain, gather_facts("trainer 1", torch.device("cpu"))])


def test_the_table_has_a_row_for_each_rank() -> None:
    facts = [gpu(f"trainer {n}", f"GPU-{n}") for n in range(5)]
    rows = table(facts).splitlines()
    assert [row.split("  ")[0] for row in rows] == ["rank", *(fact.name for fact in facts)]


def test_hints_mention_multicast_only_across_hosts() -> None:
    near = [gpu("trainer 0", "GPU-0"), gpu("trainer 1", "GPU-1")]
    far = [near[0], EnvironmentFacts("w", "host-b", "nccl", 22809, "GPU-2", {})]
    assert "NCCL_NVLS_ENABLE" not in connection_hints(near)
    assert "NCCL_NVLS_ENABLE=0" in connection_hints(far)
