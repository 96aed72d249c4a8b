"""Contract of every transport: the logical values of any tensor arrive, whatever its layout."""

from __future__ import annotations

import pytest
import torch

from tests.harness.contract import connecting, plain_model
from tests.harness.sources import Held, rows, whole
from weight_sync.layout import Box

pytestmark = pytest.mark.timeout(30)


def strided_sources() -> dict[str, torch.Tensor]:
    base = torch.arange(32, dtype=torch.float32).reshape(16, 2)
    scale = torch.arange(32, dtype=torch.float32).reshape(4, 8)[:, ::2]
    return {"column": base[:, 0], "transposed": base.t(), "every other": base[::2], "scale": scale}


def test_b42_strided_sources_arrive_with_their_logical_values(transport: str) -> None:
    sources = strided_sources()
    assert not any(t.is_contiguous() for t in sources.values())
    model = plain_model({n: torch.zeros_like(t).contiguous() for n, t in sources.items()})
    with connecting(transport) as connect:
        setup = connect([sources], [model])
        setup.sync(1)
        assert setup.value("column").tolist() == list(range(0, 32, 2))
        assert setup.value("transposed").tolist() == [
            list(range(0, 32, 2)),
            list(range(1, 32, 2)),
        ]
        assert setup.value("every other").tolist() == [[4 * i, 4 * i + 1] for i in range(8)]
        assert setup.value("scale").tolist() == [
            [8 * i + 2 * k for k in range(4)] for i in range(4)
        ]


def test_b36_empty_tensors_and_scalars_arrive(transport: str) -> None:
    sources = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 64),
        "one": torch.tensor([7.0]),
        "count": torch.tensor(11, dtype=torch.int64),
    }
    model = plain_model({n: torch.zeros_like(t) for n, t in sources.items()})
    with connecting(transport) as connect:
        setup = connect([sources], [model])
        setup.sync(1)
        assert setup.value("scalar").item() == 3.5
        assert setup.value("scalar").shape == ()
        assert setup.value("empty").shape == (0, 64)
        assert setup.value("one").tolist() == [7.0]
        assert setup.value("count").item() == 11


def test_b36_a_rank_with_nothing_to_send_neither_fails_nor_hangs(transport: str) -> None:
    full = {f"t{i}": torch.arange(8, dtype=torch.float32) + 10 * i for i in range(3)}
    # Rank 1 holds half of the middle tensor only: empty in the first chunk and in the last.
    first = {
        "t0": whole(full["t0"]),
        "t1": rows(full["t1"], 0, 4),
        "t2": whole(full["t2"]),
    }
    second = {n: rows(full[n], 8, 8) for n in ("t0", "t2")} | {"t1": rows(full["t1"], 4, 8)}
    model = plain_model({n: torch.zeros(8) for n in full})
    with connecting(transport) as connect:
        setup = connect([first, second], [model], bucket_bytes=32)
        setup.sync(1)
        assert all(torch.equal(setup.value(n), t) for n, t in full.items())


def test_b36_a_rank_that_holds_nothing_at_all_takes_part(transport: str) -> None:
    full = torch.arange(8, dtype=torch.float32)
    with connecting(transport) as connect:
        setup = connect(
            [{"t": whole(full)}, {"t": rows(full, 8, 8)}], [plain_model({"t": torch.zeros(8)})]
        )
        setup.sync(1)
        assert torch.equal(setup.value("t"), full)


def test_a_cast_on_the_way_rounds_to_nearest_even(transport: str) -> None:
    # Halfway between two bf16 neighbours in both directions, and values that bf16 holds.
    local = torch.tensor([1.00390625, 1.01171875, -1.00390625, 3.0, float("inf"), 1e-40])
    with connecting(transport) as connect:
        setup = connect(
            [{"t": whole(local, "bfloat16")}],
            [plain_model({"t": torch.zeros(6, dtype=torch.bfloat16)})],
        )
        setup.sync(1)
        assert torch.equal(setup.value("t"), local.to(torch.bfloat16))


def test_interleaved_regions_of_two_ranks_arrive_in_their_places(transport: str) -> None:
    full = torch.arange(24, dtype=torch.float32).reshape(6, 4)
    sources = []
    for rank in range(2):
        parts = [(Box((row, 0), (1, 4)), full[row : row + 1].clone()) for row in range(rank, 6, 2)]
        sources.append({"t": Held((6, 4), "float32", parts)})
    with connecting(transport) as connect:
        setup = connect(sources, [plain_model({"t": torch.zeros(6, 4)})])
        setup.sync(1)
        assert torch.equal(setup.value("t"), full)


def test_what_is_written_after_the_return_never_appears(transport: str) -> None:
    source = torch.zeros(4096)
    with connecting(transport) as connect:
        setup = connect([{"t": source}], [plain_model({"t": torch.full((4096,), -1.0)})])
        for version in range(1, 21):
            source.fill_(version)
            setup.sync(version)
            source.fill_(-version)
            assert setup.value("t").unique().tolist() == [version]
