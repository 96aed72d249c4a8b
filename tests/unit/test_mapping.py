"""Mapped storages of another process: read-only, checked against their handle, mapped once."""

from __future__ import annotations

import os

import pytest
import torch
from msgspec import structs

from weight_sync.errors import EnvironmentUnsupportedError
from weight_sync.messages import StorageHandle
from weight_sync.trainer.export import share_storage
from weight_sync.transports.mapping import Mapper

CPU = torch.device("cpu")


@pytest.fixture
def shared() -> tuple[torch.Tensor, StorageHandle]:
    return share_storage(64, CPU)


def test_later_writes_of_the_owner_show(shared: tuple[torch.Tensor, StorageHandle]) -> None:
    memory, handle = shared
    mapped = Mapper(CPU).map(handle, "trainer 0")
    memory.copy_(torch.arange(64, dtype=torch.uint8))
    assert torch.equal(mapped, memory)  # type: ignore[arg-type]
    assert mapped.data_ptr() != memory.data_ptr()  # type: ignore[union-attr]


def test_one_storage_is_mapped_once(shared: tuple[torch.Tensor, StorageHandle]) -> None:
    mapper = Mapper(CPU)
    assert mapper.map(shared[1], "trainer 0") is mapper.map(shared[1], "trainer 0")
    assert mapper.opened == 1
    mapper.close()
    mapper.close()
    assert mapper.opened == 0


def test_mapping_keeps_no_descriptor_open(shared: tuple[torch.Tensor, StorageHandle]) -> None:
    mapper = Mapper(CPU)
    mapper.map(shared[1], "trainer 0")
    before = len(os.listdir("/proc/self/fd"))
    # Each storage holds one descriptor of its own, its mapping two more would show.
    more = [share_storage(64, CPU) for _ in range(4)]
    for _, handle in more:
        mapper.map(handle, "trainer 0")
    with_maps = len(os.listdir("/proc/self/fd"))
    mapper.close()
    assert len(os.listdir("/proc/self/fd")) <= with_maps
    assert with_maps - before <= 2 * len(more)


@pytest.mark.parametrize("lie", [{"inode": 1}, {"nbytes": 1 << 20}, {"descriptor": 9999}])
def test_a_handle_that_does_not_fit_its_storage_is_refused(
    shared: tuple[torch.Tensor, StorageHandle], lie: dict[str, int]
) -> None:
    handle = structs.replace(shared[1], **lie)
    with pytest.raises(EnvironmentUnsupportedError, match="trainer 3"):
        Mapper(CPU).map(handle, "trainer 3")


def test_a_process_that_is_gone_is_refused_with_a_way_out() -> None:
    handle = StorageHandle("shm", 64, pid=2**22 + 1, descriptor=3, inode=1)
    with pytest.raises(EnvironmentUnsupportedError, match="broadcast or reshard"):
        Mapper(CPU).map(handle, "trainer 0")
