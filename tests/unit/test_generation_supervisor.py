"""Background restarts of dead shards, with real threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from generation.fleet import FleetHealthPolicy, GenerationFleetHealth, ShardState
from generation.supervisor import EngineSupervisor

WAIT_S = 5.0


class Restarts:
    """A restart that blocks until released, and counts how often it ran."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.entered = threading.Semaphore(0)
        self.shards: list[int] = []
        self.error: BaseException | None = None

    def __call__(self, shard: int) -> str | None:
        """Blocks, then fails or returns a new address."""
        self.shards.append(shard)
        self.entered.release()
        assert self.release.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return f"u{shard}-new"


@pytest.fixture
def restarts() -> Iterator[Restarts]:
    """Yields a restart whose threads are let go at the end."""
    restart = Restarts()
    yield restart
    restart.release.set()


@pytest.fixture
def health() -> GenerationFleetHealth:
    """Returns three shards of which 0 and 2 are dead."""
    policy = FleetHealthPolicy(max_restart_attempts_per_shard=1)
    fleet = GenerationFleetHealth(3, policy, ["u0", "u1", "u2"])
    fleet.record_actor_death(0)
    fleet.record_actor_death(2)
    return fleet


def test_tick_restarts_dead_shards_without_waiting(
    health: GenerationFleetHealth, restarts: Restarts
) -> None:
    supervisor = EngineSupervisor(health, restarts)
    assert supervisor.tick() == [0, 2]
    assert [health.state_of(i) for i in (0, 1, 2)] == [
        ShardState.RESTARTING,
        ShardState.HEALTHY,
        ShardState.RESTARTING,
    ]


def test_shards_restart_concurrently(health: GenerationFleetHealth, restarts: Restarts) -> None:
    EngineSupervisor(health, restarts).tick()
    assert restarts.entered.acquire(timeout=WAIT_S)
    assert restarts.entered.acquire(timeout=WAIT_S)
    assert sorted(restarts.shards) == [0, 2]


def test_running_restart_is_not_started_again(
    health: GenerationFleetHealth, restarts: Restarts
) -> None:
    supervisor = EngineSupervisor(health, restarts)
    supervisor.tick()
    assert supervisor.tick() == []


def test_restarted_shard_is_stale_at_its_new_address(
    health: GenerationFleetHealth, restarts: Restarts
) -> None:
    supervisor = EngineSupervisor(health, restarts)
    supervisor.tick()
    restarts.release.set()
    assert supervisor.drain(WAIT_S) == []
    assert health.state_of(0) is ShardState.STALE
    assert health.snapshot()[0].base_url == "u0-new"


@pytest.mark.parametrize("error", [RuntimeError("no device"), SystemExit("no device")])
def test_failed_restart_leaves_the_shard_dead_with_the_reason(
    health: GenerationFleetHealth, restarts: Restarts, error: BaseException
) -> None:
    supervisor = EngineSupervisor(health, restarts)
    restarts.error = error
    restarts.release.set()
    supervisor.tick()
    assert supervisor.drain(WAIT_S) == []
    assert health.state_of(0) is ShardState.DEAD
    assert "no device" in health.snapshot()[0].last_error


def test_shard_is_retired_when_its_restarts_are_used_up(
    health: GenerationFleetHealth, restarts: Restarts
) -> None:
    first = EngineSupervisor(health, restarts)
    restarts.error = RuntimeError("no device")
    restarts.release.set()
    first.tick()
    first.drain(WAIT_S)
    assert EngineSupervisor(health, restarts).tick() == []
    assert health.state_of(0) is ShardState.RETIRED


def test_overdue_restart_retires_its_shard_and_is_not_repeated(
    health: GenerationFleetHealth, restarts: Restarts
) -> None:
    now = [0.0]
    supervisor = EngineSupervisor(health, restarts, restart_timeout_s=10.0, clock=lambda: now[0])
    supervisor.tick()
    now[0] = 11.0
    assert supervisor.tick() == []
    assert health.state_of(0) is ShardState.RETIRED
    assert "did not end within 10.0 s" in health.snapshot()[0].last_error


def test_drain_gives_up_at_its_deadline_and_names_the_shards(
    health: GenerationFleetHealth, restarts: Restarts
) -> None:
    supervisor = EngineSupervisor(health, restarts)
    supervisor.tick()
    began = time.monotonic()
    assert supervisor.drain(0.1) == [0, 2]
    assert time.monotonic() - began < WAIT_S / 2


def test_no_restart_starts_after_drain(health: GenerationFleetHealth, restarts: Restarts) -> None:
    supervisor = EngineSupervisor(health, restarts)
    supervisor.drain(0.0)
    assert supervisor.tick() == []
    assert health.state_of(0) is ShardState.DEAD
