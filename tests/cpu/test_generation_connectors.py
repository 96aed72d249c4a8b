"""Which of vLLM's KV connectors let a refit drop what they cached."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from generation.engine_facts import connector_can_reset, has_profiler


def facts(connector: str | None) -> SimpleNamespace:
    if connector is None:
        return SimpleNamespace(kv_transfer_config=None)
    from vllm.config import KVTransferConfig

    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_connector=connector, kv_role="kv_both")
    )


@pytest.mark.parametrize(
    ("connector", "can"), [(None, True), ("OffloadingConnector", True), ("ExampleConnector", False)]
)
def test_a_connector_without_a_reset_of_its_own_is_not_taken_for_one_that_did(
    connector: str | None, can: bool
):
    assert connector_can_reset(facts(connector)) is can


def test_an_engine_without_a_profiler_is_told_apart():
    from vllm.config import ProfilerConfig

    off = SimpleNamespace(profiler_config=ProfilerConfig())
    on = SimpleNamespace(
        profiler_config=ProfilerConfig(profiler="torch", torch_profiler_dir="/tmp")
    )
    assert (has_profiler(off), has_profiler(on)) == (False, True)
