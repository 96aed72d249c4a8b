"""The second process of the environment checks: maps memory of the first and reads it.

Run as ``python -m weight_sync.environment_peer DEVICE HANDLES``; prints a JSON list with one text
per handle, empty where every byte was right.
"""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import torch

from weight_sync.errors import WeightSyncError
from weight_sync.kernels.compiler import compile_copy
from weight_sync.kernels.pieces import PieceTable
from weight_sync.messages import StorageHandle
from weight_sync.transports.mapping import Mapper


def read(mapper: Mapper, handle: StorageHandle, device: torch.device) -> str:
    """Copies a storage with the kernel that refits use; says what is wrong with it, if anything."""
    nbytes = handle.nbytes
    target = torch.empty(nbytes, dtype=torch.uint8, device=device)
    one, zero = np.ones((1, 1), np.int64), np.zeros(1, np.int64)
    table = PieceTable(
        src_dtype="uint8",
        dst_dtype="uint8",
        shape=one * nbytes,
        src_buffer=zero.astype(np.int32),
        src_offset=zero,
        src_stride=one,
        dst_buffer=zero.astype(np.int32),
        dst_offset=zero,
        dst_stride=one,
        index_offset=zero,
        index_stride=one,
        slot=zero.astype(np.int32),
    )
    try:
        compile_copy([table], [mapper.map(handle, "the first process")], [target]).run()
        have = target.cpu()
    except (WeightSyncError, RuntimeError) as error:
        return str(error)
    want = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    return "" if torch.equal(have, want) else "other bytes than the first process wrote"


def main() -> None:
    """Answers for every handle."""
    device = torch.device(sys.argv[1])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    handles = msgspec.json.decode(sys.argv[2], type=list[StorageHandle])
    mapper = Mapper(device)
    print(msgspec.json.encode([read(mapper, handle, device) for handle in handles]).decode())
    mapper.close()


if __name__ == "__main__":
    main()
