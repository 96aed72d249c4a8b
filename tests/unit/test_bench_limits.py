"""What rates are held against: bytes per path, the busiest link, and flat transfers."""

from __future__ import annotations

import numpy as np
import pytest
from plan_cases import members

from bench import group_limit
from bench.group_limit import broadcasts, measure_groups, sends
from bench.limits import busiest, measure_copies, traffic
from bench.parallelism import Parallelism
from bench.plan_model import describe
from bench.plan_sides import manifests, recordings
from weight_sync.plan import build_plan


def test_traffic_is_what_the_plan_sends() -> None:
    model, trainer, engine = describe("tiny"), Parallelism(pp=2), Parallelism(tp=2)
    plan = build_plan(members(2, 2), manifests(model, trainer), recordings(model, engine))
    sent = traffic(plan)
    assert sent.shape == (2, 2)
    assert sent.sum(axis=1).tolist() == plan.sender_bytes().tolist()
    assert sent.sum() == plan.bytes_sent


@pytest.mark.parametrize(
    ("sent", "trainers", "workers", "seconds"),
    [
        # Two peers share the way into one GPU.
        ([[6], [6]], ["cuda:1", "cuda:2"], ["cuda:0"], 6.0),
        # One peer shares its way out between two.
        ([[6, 6]], ["cuda:2"], ["cuda:0", "cuda:1"], 6.0),
        # Four pairs: every link carries half.
        ([[6, 6], [6, 6]], ["cuda:2", "cuda:3"], ["cuda:0", "cuda:1"], 6.0),
        # What lies on the GPU itself comes beside what its peer sends.
        ([[10], [6]], ["cuda:0", "cuda:1"], ["cuda:0"], 3.0),
        # Workers on CPUs copy beside each other.
        ([[10, 10]], ["cpu"], ["cpu", "cpu"], 1.0),
    ],
)
def test_the_busiest_link_sets_the_limit(
    sent: list[list[int]], trainers: list[str], workers: list[str], seconds: float
) -> None:
    rates = {(a, b): 10.0 if a == b else 2.0 for a in trainers for b in workers}
    assert busiest(np.array(sent), trainers, workers, rates) == seconds


def test_copies_on_the_cpu_have_a_rate() -> None:
    limit = measure_copies(np.array([[5], [5]]), ["cpu", "cpu"], ["cpu"])
    assert limit.kind == "memory copy"
    assert limit.gbps > 0


def test_flat_transfers_keep_the_shares_of_the_plan() -> None:
    pattern = sends(np.array([[300, 100], [100, 0]])).scaled(4000)
    assert pattern.rows == ((3000, 1000), (1000, 0))
    assert pattern.payload == 5000
    pattern = broadcasts(np.array([300, 100]), 200).scaled(4000)
    assert pattern.rows == ((3000,), (1000,))
    assert pattern.payload == 2000


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_flat_transfers_between_processes_have_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_limit, "_CPU_BYTES", 1 << 20)
    sent = np.array([[3], [5]])
    patterns = [sends(sent), broadcasts(np.array([3, 5]), 8), sends(sent * [[1], [0]])]
    limits = measure_groups(patterns, ["cpu", "cpu"], ["cpu"])
    kinds = [limit.kind for limit in limits]
    assert kinds == ["gloo send/recv", "gloo broadcast", "gloo send/recv"]
    assert all(limit.gbps > 0 for limit in limits)
