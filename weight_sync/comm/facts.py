"""What each rank knows of its machine, compared before a group is built.

NCCL picks its transports from the environment of each process. Processes that disagree fail with
an unrelated message or hang, so the facts are exchanged first and every difference is a table.
"""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from weight_sync.errors import EnvironmentUnsupportedError

if TYPE_CHECKING:
    import torch

#: Variables that change which transports NCCL chooses; this library never sets them.
COMPARED_SETTINGS = ("NCCL_CUMEM_ENABLE", "NCCL_P2P_DISABLE", "NCCL_NVLS_ENABLE")


class EnvironmentFacts(msgspec.Struct, frozen=True):
    """Facts of one rank.

    Attributes:
        name: Participant, e.g. ``"trainer 1"``.
        hostname: Its host.
        backend: ``"gloo"`` or ``"nccl"``.
        nccl_version: NCCL's version number, ``None`` for gloo.
        device_uuid: UUID of its GPU, ``None`` for gloo.
        settings: Each of ``COMPARED_SETTINGS``; ``None`` means unset.
    """

    name: str
    hostname: str
    backend: str
    nccl_version: int | None = None
    device_uuid: str | None = None
    settings: dict[str, str | None] = {}


def gather_facts(name: str, device: torch.device) -> EnvironmentFacts:
    """Facts of this process for a group on ``device``; imports the GPU libraries only for CUDA.

    Raises:
        EnvironmentUnsupportedError: The device is a GPU and CuPy with NCCL is not installed.
    """
    settings = {key: os.environ.get(key) for key in COMPARED_SETTINGS}
    if device.type != "cuda":
        return EnvironmentFacts(name, socket.gethostname(), "gloo")
    import torch

    from weight_sync.comm.nccl_launch import nccl_library

    return EnvironmentFacts(
        name,
        socket.gethostname(),
        "nccl",
        nccl_library().get_version(),
        str(torch.cuda.get_device_properties(device).uuid),
        settings,
    )


def compare_environments(facts: Sequence[EnvironmentFacts]) -> None:
    """Refuses a set of ranks that could not form a working group.

    Raises:
        EnvironmentUnsupportedError: Ranks differ in backend, NCCL version or a compared setting
            (unset differs from set), or two ranks share a GPU. The message holds a table with
            one row per rank.
    """
    rows = [_row(fact) for fact in facts]
    problems = []
    different = [key for key in rows[0] if len({row[key] for row in rows}) > 1] if rows else []
    if different:
        problems.append(f"ranks differ in {', '.join(different)}")
    owners: dict[str, list[str]] = defaultdict(list)
    for fact in facts:
        if fact.device_uuid is not None:
            owners[fact.device_uuid].append(fact.name)
    for uuid, names in sorted(owners.items()):
        if len(names) > 1:
            problems.append(
                f"{' and '.join(names)} use the same GPU {uuid}, which NCCL forbids in one group; "
                "use the ipc transport on a shared GPU or give each rank its own"
            )
    if problems:
        raise EnvironmentUnsupportedError(
            f"{'; '.join(problems)}. Nothing was changed. Give every process the same NCCL and the "
            "same settings before it starts (NCCL_DEBUG=INFO shows what it reads).\n" + table(facts)
        )


def connection_hints(facts: Sequence[EnvironmentFacts]) -> str:
    """Advice for a group that did not connect in time; never empty."""
    hints = ["set NCCL_DEBUG=INFO to see which step of the connection each rank reached"]
    if len({fact.hostname for fact in facts}) > 1:
        hints.append("check that NCCL_SOCKET_IFNAME names an interface that all hosts share")
        if any(fact.settings.get("NCCL_NVLS_ENABLE") != "0" for fact in facts):
            hints.append("try NCCL_NVLS_ENABLE=0 on every rank, multicast needs all hosts' fabric")
    return "; ".join(hints)


def table(facts: Sequence[EnvironmentFacts]) -> str:
    """One aligned row per rank: name, host, GPU, then everything that must agree."""
    head = ["rank", "host", "gpu", *(_row(facts[0]) if facts else ())]
    body = [
        [fact.name, fact.hostname, fact.device_uuid or "-", *_row(fact).values()] for fact in facts
    ]
    widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in [head, *body]
    )


def _row(fact: EnvironmentFacts) -> dict[str, str]:
    """What must be equal on all ranks, as text."""
    row = {
        "backend": fact.backend,
        "nccl": "-" if fact.nccl_version is None else str(fact.nccl_version),
    }
    for key in COMPARED_SETTINGS:
        value = fact.settings.get(key)
        row[key] = "unset" if value is None else value
    return row
