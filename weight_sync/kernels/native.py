"""Unaligned loads, stores and block copies on plain addresses, for the compiled CPU loops.

One table of tiles then serves any number of buffers of any alignment, shared memory included.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

_WORDS = {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}


def _pointer(builder: Any, address: Any, index: Any, size: int) -> Any:  # noqa: ANN401
    # Base and index stay apart so that LLVM sees a regular stride and vectorizes the loop.
    base = builder.inttoptr(address, ir.IntType(8 * size).as_pointer())
    return builder.gep(base, [index])


def _loader(size: int) -> Any:  # noqa: ANN401
    @intrinsic
    def load(_context: Any, _address: Any, _index: Any) -> Any:  # noqa: ANN401
        def code(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
            return builder.load(_pointer(builder, args[0], args[1], size), align=1)

        return _WORDS[size](types.int64, types.int64), code

    return load


def _storer(size: int) -> Any:  # noqa: ANN401
    @intrinsic
    def store(_context: Any, _address: Any, _index: Any, _value: Any) -> Any:  # noqa: ANN401
        def code(target: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
            builder.store(args[2], _pointer(builder, args[0], args[1], size), align=1)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, _WORDS[size]), code

    return store


# load(address, index): the ``index``-th word after ``address``; store likewise.
load1, load2, load4, load8 = (_loader(n) for n in (1, 2, 4, 8))
store1, store2, store4, store8 = (_storer(n) for n in (1, 2, 4, 8))


@intrinsic
def copy_block(_context: Any, _dst: Any, _src: Any, _nbytes: Any) -> Any:  # noqa: ANN401
    """``memcpy(dst, src, nbytes)``; addresses as int64."""

    def code(target: Any, builder: Any, _signature: Any, args: Any) -> Any:  # noqa: ANN401
        byte = ir.IntType(8).as_pointer()
        dst = builder.inttoptr(args[0], byte)
        src = builder.inttoptr(args[1], byte)
        cgutils.raw_memcpy(builder, dst, src, args[2], 1)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), code
