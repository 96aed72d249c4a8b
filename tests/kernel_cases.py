"""Piece tables with known answers; the CPU and the CUDA kernels run the same ones.

Answers come from numpy index arithmetic, element by element, and from ``Tensor.to`` for casts:
nothing here shares code with what it judges, and no alignment is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray

from weight_sync.dtypes import ITEMSIZE
from weight_sync.kernels import mix
from weight_sync.kernels.compiler import compile_copy, compile_digest
from weight_sync.kernels.pieces import PieceTable

I64 = NDArray[np.int64]
POISON = 0xA5
NAN_BITS = {"float32": 0x7FC00000, "bfloat16": 0x7FC0, "float16": 0x7E00}
CASTS = [p for p in permutations(("float32", "bfloat16", "float16"), 2)]
SAME = [(name, name) for name in ITEMSIZE]
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class View:
    """One side of a piece: a buffer, an element offset, and element strides."""

    buffer: int
    offset: int
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """One row of a table, readable."""

    shape: tuple[int, ...]
    src: View
    dst: View
    index: View
    slot: int = 0


@dataclass
class Case:
    """A table with its buffers on the host.

    Attributes:
        table: The pieces.
        src: uint8 arrays, the source buffers.
        dst: uint8 arrays, the destination buffers, poisoned.
        slots: Number of digest slots.
        shift: Bytes by which source and destination buffers are moved off their alignment.
    """

    table: PieceTable
    src: list[NDArray[np.uint8]]
    dst: list[NDArray[np.uint8]]
    slots: int = 1
    shift: tuple[int, int] = (0, 0)
    name: str = field(default="", compare=False)


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    return tuple(int(np.prod(shape[d + 1 :])) for d in range(len(shape)))


def table_of(pieces: Sequence[Piece], src_dtype: str, dst_dtype: str) -> PieceTable:
    """Packs pieces of any ranks, padded on the left as the contract says."""
    rank = max((len(p.shape) for p in pieces), default=1)

    def pad(values: Sequence[int], fill: int) -> list[int]:
        return [fill] * (rank - len(values)) + list(values)

    def ints(values: list[int] | list[list[int]], wide: bool = False) -> I64:
        return np.array(values, np.int64).reshape((len(pieces), rank) if wide else (len(pieces),))

    return PieceTable(
        src_dtype=src_dtype,
        dst_dtype=dst_dtype,
        shape=ints([pad(p.shape, 1) for p in pieces], wide=True),
        src_buffer=ints([p.src.buffer for p in pieces]).astype(np.int32),
        src_offset=ints([p.src.offset for p in pieces]),
        src_stride=ints([pad(p.src.stride, 0) for p in pieces], wide=True),
        dst_buffer=ints([p.dst.buffer for p in pieces]).astype(np.int32),
        dst_offset=ints([p.dst.offset for p in pieces]),
        dst_stride=ints([pad(p.dst.stride, 0) for p in pieces], wide=True),
        index_offset=ints([p.index.offset for p in pieces]),
        index_stride=ints([pad(p.index.stride, 0) for p in pieces], wide=True),
        slot=ints([p.slot for p in pieces]).astype(np.int32),
    )


def positions(shape: I64, offset: int, stride: I64) -> I64:
    """Element positions of a box in row-major order of the box."""
    at = np.full(1, offset, np.int64)
    for size, step in zip(shape.tolist(), stride.tolist(), strict=True):
        at = (at[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
    return at


def read_elements(buffer: NDArray[np.uint8], at: I64, size: int) -> NDArray[np.unsignedinteger]:
    """Bit patterns of the elements at some positions."""
    picked = buffer[at[:, None] * size + np.arange(size)]
    return np.ascontiguousarray(picked).reshape(-1).view(UNSIGNED[size])


def cast(
    bits: NDArray[np.unsignedinteger], src_dtype: str, dst_dtype: str
) -> NDArray[np.unsignedinteger]:
    """``Tensor.to`` on bit patterns, with the NaN that the kernels promise."""
    if src_dtype == dst_dtype or not len(bits):
        return bits.astype(UNSIGNED[ITEMSIZE[dst_dtype]])
    source = torch.from_numpy(bits.view(np.uint8).copy()).view(getattr(torch, src_dtype))
    target = source.to(getattr(torch, dst_dtype))
    out = target.view(torch.uint8).numpy().view(UNSIGNED[ITEMSIZE[dst_dtype]]).copy()
    out[torch.isnan(target).numpy()] = NAN_BITS[dst_dtype]
    return out


def _values(case: Case, piece: int) -> NDArray[np.unsignedinteger]:
    t = case.table
    at = positions(t.shape[piece], int(t.src_offset[piece]), t.src_stride[piece])
    if not len(at):
        return np.zeros(0, UNSIGNED[ITEMSIZE[t.dst_dtype]])
    raw = read_elements(case.src[t.src_buffer[piece]], at, ITEMSIZE[t.src_dtype])
    return cast(raw, t.src_dtype, t.dst_dtype)


def expected_copy(case: Case) -> list[NDArray[np.uint8]]:
    """What every destination buffer must hold, poison included."""
    out = [b.copy() for b in case.dst]
    t = case.table
    size = ITEMSIZE[t.dst_dtype]
    for piece in range(len(t)):
        at = positions(t.shape[piece], int(t.dst_offset[piece]), t.dst_stride[piece])
        value = np.ascontiguousarray(_values(case, piece)).view(np.uint8).reshape(-1, size)
        out[t.dst_buffer[piece]][at[:, None] * size + np.arange(size)] = value
    return out


def expected_digest(case: Case) -> NDArray[np.uint64]:
    """The digest of the source values, after their cast, by ``mix.reference``."""
    out = [0] * case.slots
    t = case.table
    for piece in range(len(t)):
        at = positions(t.shape[piece], int(t.index_offset[piece]), t.index_stride[piece])
        term = mix.reference(_values(case, piece), at.astype(np.uint64))
        out[t.slot[piece]] = (out[t.slot[piece]] + term) % (1 << 64)
    return np.array(out, np.uint64)


def place(buffers: Sequence[NDArray[np.uint8]], shift: int, device: str) -> list[torch.Tensor]:
    """Buffers on a device, their first byte ``shift`` bytes past a 64-byte boundary."""
    placed = []
    for buffer in buffers:
        storage = torch.empty(len(buffer) + 128, dtype=torch.uint8, device=device)
        start = -storage.data_ptr() % 64 + shift
        view = storage[start : start + len(buffer)]
        view.copy_(torch.from_numpy(buffer))
        placed.append(view)
    return placed


def _noise(rng: np.random.Generator, nbytes: int) -> NDArray[np.uint8]:
    return rng.integers(0, 256, nbytes, dtype=np.uint8)


def _poison(nbytes: int) -> NDArray[np.uint8]:
    return np.full(nbytes, POISON, np.uint8)


def _layout(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Strides of a box inside some larger, possibly transposed tensor, and elements spanned."""
    order = list(range(len(shape)))
    if rng.random() < 0.4:
        rng.shuffle(order)
    stride = [0] * len(shape)
    step = int(rng.choice([1, 1, 1, 2]))
    for d in reversed(order):
        stride[d] = step
        step *= shape[d] + int(rng.choice([0, 0, 3]))
    return tuple(stride), sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1


def random_boxes(seed: int, src_dtype: str, dst_dtype: str) -> Case:
    """Some boxes of ranks 1 to 4 in random layouts over two buffers a side and three slots."""
    rng = np.random.default_rng(seed)
    src_end, dst_end = [0, 0], [0, 0]
    pieces = []
    for _ in range(12):
        rank = int(rng.integers(1, 5))
        shape = tuple(int(n) for n in rng.integers(1, [400, 60, 14, 7][rank - 1], rank))
        whole = tuple(n + int(rng.integers(0, 5)) for n in shape)
        corner = [int(rng.integers(0, w - n + 1)) for n, w in zip(shape, whole, strict=True)]
        index_stride = strides_of(whole)
        views = []
        for end in (src_end, dst_end):
            buffer = int(rng.integers(0, 2))
            stride, span = _layout(rng, shape)
            offset = end[buffer] + int(rng.integers(0, 9))
            end[buffer] = offset + span
            views.append(View(buffer, offset, stride))
        start = sum(c * s for c, s in zip(corner, index_stride, strict=True))
        start += int(rng.choice([0, 0, (1 << 32) - 7, 5 << 32]))
        pieces.append(
            Piece(
                shape,
                src=views[0],
                dst=views[1],
                index=View(0, start, index_stride),
                slot=int(rng.integers(0, 3)),
            )
        )
    src_size, dst_size = ITEMSIZE[src_dtype], ITEMSIZE[dst_dtype]
    return Case(
        table_of(pieces, src_dtype, dst_dtype),
        [_noise(rng, (n + 5) * src_size) for n in src_end],
        [_poison((n + 5) * dst_size) for n in dst_end],
        slots=3,
        name=f"boxes-{src_dtype}-{dst_dtype}-{seed}",
    )


def dense(count: int, dtype: str, dst_dtype: str = "", index: int = 0, seed: int = 0) -> Case:
    """One flat piece of ``count`` elements."""
    dst_dtype = dst_dtype or dtype
    rng = np.random.default_rng(seed)
    piece = Piece((count,), View(0, 0, (1,)), View(0, 0, (1,)), View(0, index, (1,)))
    return Case(
        table_of([piece], dtype, dst_dtype),
        [_noise(rng, count * ITEMSIZE[dtype])],
        [_poison((count + 3) * ITEMSIZE[dst_dtype])],
        name=f"dense-{count}-{dtype}-{dst_dtype}-{index}",
    )


def rows(height: int, width: int, dtype: str, pad: tuple[int, int], dst_dtype: str = "") -> Case:
    """Columns of a wider matrix to columns of another: ``pad`` extra elements per row and side."""
    dst_dtype = dst_dtype or dtype
    rng = np.random.default_rng(height * width)
    wide, broad = width + pad[0], width + pad[1]
    piece = Piece(
        (height, width),
        View(0, min(pad[0], 3), (wide, 1)),
        View(0, min(pad[1], 1), (broad, 1)),
        View(0, 11, (width + 4, 1)),
    )
    return Case(
        table_of([piece], dtype, dst_dtype),
        [_noise(rng, height * wide * ITEMSIZE[dtype])],
        [_poison(height * broad * ITEMSIZE[dst_dtype])],
        name=f"rows-{height}x{width}-{dtype}-{dst_dtype}-{pad[0]}-{pad[1]}",
    )


def transpose(height: int, width: int, dtype: str) -> Case:
    """A matrix written transposed."""
    rng = np.random.default_rng(height)
    piece = Piece(
        (height, width),
        View(0, 0, (width, 1)),
        View(0, 2, (1, height)),
        View(0, 0, (width, 1)),
    )
    size = ITEMSIZE[dtype]
    return Case(
        table_of([piece], dtype, dtype),
        [_noise(rng, height * width * size)],
        [_poison((height * width + 4) * size)],
        name=f"transpose-{height}x{width}-{dtype}",
    )


def empties() -> Case:
    """Boxes without elements, one of them far outside its buffer, next to one that has some."""
    nothing = View(0, 1 << 40, (5, 1))
    real = View(0, 0, (5, 1))
    pieces = [
        Piece((0, 5), nothing, nothing, real),
        Piece((2, 5), real, real, real),
        Piece((5, 0), View(7, 0, (1, 1)), real, real),
    ]
    table = table_of(pieces, "float32", "float32")
    return Case(table, [_noise(np.random.default_rng(1), 40)], [_poison(60)], name="empties")


def scalars() -> Case:
    """0-dim tensors: tables of rank 0."""
    pieces = [
        Piece((), View(0, i, ()), View(0, 2 * i + 1, ()), View(0, 0, ()), slot=i) for i in range(5)
    ]
    table = table_of(pieces, "float32", "float32")
    return Case(
        table, [_noise(np.random.default_rng(2), 20)], [_poison(48)], slots=5, name="scalars"
    )


def no_pieces() -> Case:
    """A table without rows: a rank that sends nothing of some dtype."""
    return Case(
        table_of([], "bfloat16", "bfloat16"),
        [_noise(np.random.default_rng(3), 8)],
        [_poison(8)],
        name="no-pieces",
    )


def all_patterns(src_dtype: str, dst_dtype: str) -> Case:
    """Every 16-bit pattern, or for float32 every rounding border of the 16-bit formats."""
    if src_dtype == "float32":
        high = np.arange(1 << 16, dtype=np.uint32) << 16
        bits = np.concatenate([high | low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
        half = np.arange(1 << 19, dtype=np.uint32) << 13
        bits = np.concatenate([bits, half + 0xFFF, half + 0x1000, half + 0x1001])
    else:
        bits = np.arange(1 << 16, dtype=np.uint16)
    case = dense(len(bits), src_dtype, dst_dtype)
    return Case(case.table, [bits.view(np.uint8)], case.dst, name=f"all-{src_dtype}-{dst_dtype}")


CASES: list[Case] = [
    *(random_boxes(seed, *pair) for seed, pair in enumerate(SAME + CASTS)),
    *(random_boxes(100 + seed, "bfloat16", "bfloat16") for seed in range(6)),
    dense(300_001, "uint8"),
    dense(200_003, "bfloat16"),
    dense(150_001, "float32", "bfloat16"),
    dense(70_001, "int64", index=(1 << 31) - 9),
    dense(4_099, "uint8", index=(1 << 32) - 2_051),
    dense(4_099, "bfloat16", index=(1 << 32) - 2_051),
    dense(4_099, "float32", index=(3 << 32) - 1_001),
    dense(4_099, "float32", "float16", index=(1 << 32) - 2_051),
    rows(700, 256, "bfloat16", (256, 0)),
    rows(701, 129, "bfloat16", (8, 3)),
    rows(5_000, 7, "bfloat16", (1, 9)),
    rows(3_000, 5, "uint8", (2, 11)),
    rows(3, 150_000, "bfloat16", (5, 8)),
    rows(300, 100, "float32", (4, 20), "bfloat16"),
    rows(300, 101, "bfloat16", (4, 21), "float32"),
    transpose(130, 257, "bfloat16"),
    transpose(64, 1_000, "float32"),
    transpose(33, 65, "int64"),
    empties(),
    scalars(),
    no_pieces(),
    *(all_patterns(*pair) for pair in CASTS),
]

ALIGNMENT_DTYPES = [
    ("uint8", "uint8"),
    ("bfloat16", "bfloat16"),
    ("float32", "float32"),
    ("int64", "int64"),
    ("float32", "bfloat16"),
    ("bfloat16", "float32"),
]


def alignments(src_dtype: str, dst_dtype: str) -> list[Case]:
    """Ragged rows at each of the 16 x 16 byte alignments of source and destination.

    The first 16 cases are all source alignments.
    """
    case = rows(5, 67, src_dtype, (3, 2), dst_dtype)
    shifts = [(a, b) for b in range(16) for a in range(16)]
    return [Case(case.table, case.src, case.dst, shift=s, name=f"at-{s}") for s in shifts]


def check_copy(case: Case, device: str) -> None:
    """The destination, poison included, is what index arithmetic says."""
    src, dst = place(case.src, case.shift[0], device), place(case.dst, case.shift[1], device)
    compile_copy([case.table], src, dst).run()
    for got, want in zip(dst, expected_copy(case), strict=True):
        np.testing.assert_array_equal(got.cpu().numpy(), want, err_msg=case.name)


def check_source_digest(case: Case, device: str) -> None:
    """The digest of the source is the one ``mix`` defines."""
    src = place(case.src, case.shift[0], device)
    got = compile_digest([case.table], src, "src", case.slots).run()
    np.testing.assert_array_equal(got, expected_digest(case), err_msg=case.name)


def check_destination_digest(case: Case, device: str) -> None:
    """The digest of a destination that holds the right bytes is that of the source."""
    dst = place(expected_copy(case), case.shift[1], device)
    got = compile_digest([case.table], dst, "dst", case.slots).run()
    np.testing.assert_array_equal(got, expected_digest(case), err_msg=case.name)


def check_flipped_bits(dtype: str, device: str) -> None:
    """Every bit of a small tensor changes the digest when it flips, and flips back."""
    case = dense(9, dtype)
    (buffer,) = place(case.src, 0, device)
    program = compile_digest([case.table], [buffer], "src", 1)
    right = int(program.run()[0])
    unseen = []
    for byte in range(len(buffer)):
        for bit in range(8):
            buffer[byte] ^= 1 << bit
            if int(program.run()[0]) == right:
                unseen.append((byte, bit))
            buffer[byte] ^= 1 << bit
    assert unseen == []
    assert int(program.run()[0]) == right


def check_cuts(device: str) -> None:
    """Shards of a matrix, by rows and columns, in any order, add up to the digest of the whole."""
    rng = np.random.default_rng(5)
    height, width = 37, 53
    buffers = place([_noise(rng, height * width * 2)], 0, device)

    def box(top: int, left: int, tall: int, wide: int) -> Piece:
        view = View(0, top * width + left, (width, 1))
        return Piece((tall, wide), view, view, view)

    def digest(pieces: list[Piece]) -> int:
        table = table_of(pieces, "bfloat16", "bfloat16")
        return int(compile_digest([table], buffers, "src", 1).run()[0])

    whole = digest([box(0, 0, height, width)])
    parts = [
        box(top, left, min(10, height - top), min(17, width - left))
        for top in range(0, height, 10)
        for left in range(0, width, 17)
    ]
    order = [parts[i] for i in rng.permutation(len(parts))]
    shares = digest(order[:5]) + digest(order[5:])
    assert digest(parts) == digest(order) == whole
    assert shares % (1 << 64) == whole
