"""Who is on the same GPU: by UUID, never by position or by a local index.

Processes see different subsets of a machine's GPUs in different orders, so index 0 of one may be
index 2 of another, and bundle order is not GPU order. Only the UUID says which GPU it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from weight_sync.errors import ConfigError

# What separates a receiver from an owner; smaller is closer.
SAME_DEVICE, SAME_HOST, ANOTHER_HOST = 0, 1, 2


def canonical(device: str) -> str:
    """One spelling of a device identity.

    Args:
        device: ``"GPU-<uuid>"`` in either case, a bare UUID, or a name such as ``"cpu"``.
    """
    bare = device.strip().lower().removeprefix("gpu-")
    return f"GPU-{bare}" if bare.count("-") == 4 else bare


def visible(devices: Sequence[str], setting: str | None) -> tuple[str, ...]:
    """What a process sees under a value of ``CUDA_VISIBLE_DEVICES``, in its order.

    Args:
        devices: UUIDs of all GPUs of the machine, in the driver's order.
        setting: Indices, or UUIDs with or without ``GPU-`` (unique prefixes suffice), separated by
            commas; None if the variable is not set.

    Raises:
        ConfigError: If an entry names no GPU; lists what was wanted and what there is.
    """
    known = [canonical(d) for d in devices]
    if setting is None:
        return tuple(known)
    found = []
    for entry in filter(None, (part.strip() for part in setting.split(","))):
        if entry.isdecimal() and len(entry) < 4:
            matches = known[int(entry) : int(entry) + 1]
        else:
            prefix = "GPU-" + entry.lower().removeprefix("gpu-")
            matches = [d for d in known if d.startswith(prefix)]
        if len(matches) != 1:
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={setting!r} wants {entry!r}, which names {len(matches)} of "
                f"the GPUs here: {', '.join(known) or 'none'}. Correct it and start the process "
                "again"
            )
        found += matches
    return tuple(found)


def distances(
    owners: Sequence[tuple[str, str]], receivers: Sequence[tuple[str, str]]
) -> NDArray[np.int8]:
    """How far every receiver is from every owner.

    Args:
        owners: (host, device) of each trainer rank.
        receivers: The same of each engine worker.

    Returns:
        int8 ``[owners, receivers]`` of ``SAME_DEVICE``, ``SAME_HOST`` and ``ANOTHER_HOST``.
    """
    cost = np.full((len(owners), len(receivers)), ANOTHER_HOST, np.int8)
    for i, (host, device) in enumerate(owners):
        for j, (there, other) in enumerate(receivers):
            if host == there:
                same = canonical(device) == canonical(other)
                cost[i, j] = SAME_DEVICE if same else SAME_HOST
    return cost
