"""Measures the copy and digest kernels against what the machine's memory allows.

``python -m bench.kernels [--device cuda:0] [--peer cuda:1]`` prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch

from weight_sync.kernels.compiler import compile_copy, compile_digest
from weight_sync.kernels.pieces import PieceTable

_ROW = 4096


@dataclass(frozen=True)
class KernelRates:
    """Medians of one machine, in GB/s (1e9 bytes per second) of payload.

    Attributes:
        device: Where the kernels ran.
        nbytes: Payload of one run.
        device_copy: Plain contiguous copy on the device: the limit of ``copy_*``.
        peer_copy: Plain contiguous copy from the peer; ``None`` without one.
        copy_matrices: The batched copy of whole matrices in shuffled order.
        copy_columns: The batched copy of the left half of every row.
        copy_cast: float32 to bfloat16; payload counts bytes written.
        copy_peer: ``copy_matrices`` read from the peer; ``None`` without one.
        digest: bfloat16 digest, bytes read.
        digest_over_read: Time of the digest over that of one read of the bytes, the latter taken
            from ``device_copy``, which moves every byte twice.
    """

    device: str
    nbytes: int
    device_copy: float
    peer_copy: float | None
    copy_matrices: float
    copy_columns: float
    copy_cast: float
    copy_peer: float | None
    digest: float
    digest_over_read: float


def _table(
    matrices: int, rows: int, columns: int, src_width: int, dst_width: int, dtypes: tuple[str, str]
) -> PieceTable:
    """Matrices of ``rows x columns`` in storages of other widths, destination order shuffled."""
    n = np.arange(matrices, dtype=np.int64)
    there = np.random.default_rng(0).permutation(matrices).astype(np.int64)
    ones = np.ones((matrices, 1), np.int64)
    zero = np.zeros(matrices, np.int32)
    shape = np.concatenate([ones * rows, ones * columns], axis=1)
    wide = np.concatenate([ones * src_width, ones], axis=1)
    broad = np.concatenate([ones * dst_width, ones], axis=1)
    return PieceTable(
        src_dtype=dtypes[0],
        dst_dtype=dtypes[1],
        shape=shape,
        src_buffer=zero,
        src_offset=n * rows * src_width,
        src_stride=wide,
        dst_buffer=zero,
        dst_offset=there * rows * dst_width,
        dst_stride=broad,
        index_offset=zero.astype(np.int64),
        index_stride=wide,
        slot=n.astype(np.int32),
    )


def _seconds(work: Callable[[], object], device: torch.device, repeat: int) -> float:
    """Median time of one call, by CUDA events on a GPU."""
    work()
    times = []
    for _ in range(repeat):
        if device.type == "cuda":
            with torch.cuda.device(device):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                work()
                end.record()
                end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            work()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(
    device: str = "cuda:0", peer: str | None = None, nbytes: int = 8 << 30, repeat: int = 9
) -> KernelRates:
    """Runs every kernel on ``device`` over about ``nbytes`` of bfloat16 matrices of 4096 columns.

    Args:
        device: ``"cuda:0"``, or ``"cpu"``.
        peer: Another CUDA device to read from.
        nbytes: Payload; twice as much memory is allocated, a third time for the cast.
        repeat: Timed runs of each kernel, after one that is not timed.
    """
    where = torch.device(device)
    rows = min(_ROW, max(nbytes // (2 * _ROW), 1))
    matrices = max(nbytes // (2 * _ROW * rows), 1)
    nbytes = matrices * rows * _ROW * 2
    src = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=where)
    dst = torch.zeros(nbytes, dtype=torch.uint8, device=where)

    def rate(work: Callable[[], object], moved: int) -> float:
        return moved / _seconds(work, where, repeat) / 1e9

    def copy_rate(table: PieceTable, source: torch.Tensor) -> float:
        program = compile_copy([table], [source], [dst])
        return rate(program.run, program.nbytes)

    same = ("bfloat16", "bfloat16")
    whole = _table(matrices, rows, _ROW, _ROW, _ROW, same)
    limit = rate(lambda: dst.copy_(src), nbytes)
    matrices_rate = copy_rate(whole, src)
    columns_rate = copy_rate(_table(matrices, rows, _ROW // 2, _ROW, _ROW // 2, same), src)
    half = max(matrices // 2, 1)
    wide = src.new_zeros(half * rows * _ROW * 4)
    cast_rate = copy_rate(_table(half, rows, _ROW, _ROW, _ROW, ("float32", "bfloat16")), wide)
    del wide
    digest_rate = rate(compile_digest([whole], [src], "src", matrices).run, nbytes)
    peer_limit = peer_rate = None
    if peer is not None:
        far = torch.zeros(nbytes, dtype=torch.uint8, device=peer)
        torch.cuda.synchronize(far.device)
        peer_limit = rate(lambda: dst.copy_(far), nbytes)
        peer_rate = copy_rate(whole, far)
    return KernelRates(
        device=torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        nbytes=nbytes,
        device_copy=limit,
        peer_copy=peer_limit,
        copy_matrices=matrices_rate,
        copy_columns=columns_rate,
        copy_cast=cast_rate,
        copy_peer=peer_rate,
        digest=digest_rate,
        digest_over_read=2 * limit / digest_rate,
    )


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--peer", help="second CUDA device to read from")
    parser.add_argument("--gib", type=float, default=8.0, help="payload in GiB")
    parser.add_argument("--repeat", type=int, default=9)
    args = parser.parse_args()
    rates = measure(args.device, args.peer, int(args.gib * (1 << 30)), args.repeat)
    print(json.dumps(asdict(rates), indent=1))


if __name__ == "__main__":
    main()
