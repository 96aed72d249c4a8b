"""Expert routes as one text field: ``wsre1:<dtype>:<d0>x<d1>x<d2>:<base64>``, little-endian.

One opaque string passes through JSON services unchanged, where nested lists of integers would be
parsed and validated number by number at every hop.
"""

from __future__ import annotations

import base64
import binascii
import math
import sys

import torch

from generation.errors import InvalidRolloutError

_PREFIX = "wsre1"
_DTYPES = {"int8": torch.int8, "int16": torch.int16, "int32": torch.int32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encode_routed_experts(routes: torch.Tensor) -> str:
    """Encodes ``[tokens, layers, topk]`` expert ids of dtype int8, int16 or int32.

    Raises:
        InvalidRolloutError: Another number of dimensions or dtype.
    """
    if routes.dim() != 3 or routes.dtype not in _NAMES:
        raise InvalidRolloutError(
            f"routes must be [tokens, layers, topk] of {', '.join(_DTYPES)}, got "
            f"{tuple(routes.shape)} {routes.dtype}"
        )
    values = routes.detach().cpu().contiguous().numpy()
    little = values if sys.byteorder == "little" else values.byteswap()
    shape = "x".join(map(str, routes.shape))
    payload = base64.b64encode(little.tobytes()).decode("ascii")
    return f"{_PREFIX}:{_NAMES[routes.dtype]}:{shape}:{payload}"


def decode_routed_experts(text: str) -> torch.Tensor:
    """Decodes what :func:`encode_routed_experts` made; sizes are checked before they are used.

    Returns:
        A new CPU tensor ``[tokens, layers, topk]``.

    Raises:
        InvalidRolloutError: Not this format, or a payload that does not fit its own header.
    """
    fields = text.split(":")
    if len(fields) != 4 or fields[0] != _PREFIX or fields[1] not in _DTYPES:
        raise InvalidRolloutError(f"not an encoded route tensor: {text[:40]!r}")
    dims = fields[2].split("x")
    if len(dims) != 3 or not all(dim.isascii() and dim.isdigit() for dim in dims):
        raise InvalidRolloutError(f"encoded routes have an unreadable shape: {fields[2][:40]!r}")
    shape = [int(dim) for dim in dims]
    dtype = _DTYPES[fields[1]]
    try:
        payload = base64.b64decode(fields[3], validate=True)
    except binascii.Error as error:
        raise InvalidRolloutError(f"encoded routes are not base64: {error}") from error
    if len(payload) != math.prod(shape) * dtype.itemsize:
        raise InvalidRolloutError(
            f"encoded routes hold {len(payload)} bytes, their header says {shape} of {fields[1]}"
        )
    if not payload:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
    if sys.byteorder != "little":
        flat = flat.view(-1, dtype.itemsize).flip(1).reshape(-1)
    return flat.view(dtype).reshape(shape)
