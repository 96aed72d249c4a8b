"""Checks of the GPUs: which there are, who reaches whom, and whether memory can be handed over."""

from __future__ import annotations

import os
import subprocess

import torch

from weight_sync.environment import Finding, ask_peer
from weight_sync.errors import ConfigError, WeightSyncError
from weight_sync.identity import visible_devices
from weight_sync.pairing import visible
from weight_sync.trainer.export import share_cuda, share_storage

_PROBE_BYTES = 1 << 20


def devices() -> list[Finding]:
    """Every GPU this process sees, by UUID."""
    if not torch.cuda.is_available():
        text = "no CUDA device: refits work between CPU trainers and CPU engines"
        return [Finding("GPUs", "ok", text)]
    found = []
    for index, uuid in enumerate(visible_devices()):
        free, total = torch.cuda.mem_get_info(index)
        text = f"{uuid} {torch.cuda.get_device_name(index)}, {free >> 30} of {total >> 30} GiB free"
        found.append(Finding(f"cuda:{index}", "ok", text))
    return [*found, *_selection()]


def _selection() -> list[Finding]:
    """Whether CUDA_VISIBLE_DEVICES names what torch sees."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        text = f"nvidia-smi did not say which GPUs the machine has: {error}"
        return [Finding("CUDA_VISIBLE_DEVICES", "warn", text)]
    try:
        chosen = visible(done.stdout.split(), setting)
    except ConfigError as error:
        return [Finding("CUDA_VISIBLE_DEVICES", "fail", str(error), "correct the variable")]
    here = visible_devices()
    text = f"{setting or 'not set'}: {len(here)} GPUs"
    if set(chosen) == set(here):
        return [Finding("CUDA_VISIBLE_DEVICES", "ok", text)]
    text += f", but torch sees {', '.join(here)} where {', '.join(chosen)} were expected"
    return [
        Finding("CUDA_VISIBLE_DEVICES", "warn", text, "GPUs are told apart by UUID all the same")
    ]


def libraries() -> list[Finding]:
    """CuPy builds the kernels and brings NCCL."""
    if not torch.cuda.is_available():
        return []
    try:
        import cupy
        from cupy.cuda import nccl
    except ImportError as error:
        way = "install the wheel of your CUDA version, e.g. cupy-cuda13x"
        return [Finding("cupy", "fail", f"not usable: {error}", way)]
    nccl_version = nccl.get_version() if nccl.available else 0
    found = [Finding("cupy", "ok", cupy.__version__)]
    if not nccl_version:
        way = "install nvidia-nccl for your CUDA version; the ipc transport works without"
        return [*found, Finding("NCCL", "warn", "CuPy finds no NCCL", way)]
    theirs = ".".join(map(str, torch.cuda.nccl.version()))
    return [*found, Finding("NCCL", "ok", f"CuPy's {nccl_version}, torch's {theirs}")]


def peers() -> list[Finding]:
    """Which GPUs can read each other directly."""
    count = torch.cuda.device_count()
    found = []
    for reader in range(count):
        others = [o for o in range(count) if o != reader]
        cannot = [o for o in others if not torch.cuda.can_device_access_peer(reader, o)]
        if not others:
            continue
        name = f"cuda:{reader} reads peers"
        if cannot:
            text = f"no peer access to {', '.join(f'cuda:{o}' for o in cannot)}"
            way = "use the broadcast or reshard transport between them"
            found.append(Finding(name, "warn", text, way))
        else:
            found.append(Finding(name, "ok", ", ".join(f"cuda:{o}" for o in others)))
    return found


def memory() -> list[Finding]:
    """Whether memory of this process can be exported, and read by another one on cuda:0."""
    found: list[Finding] = []
    handles, names, kept = [], [], []
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        try:
            block, handle = share_storage(_PROBE_BYTES, device)
        except (WeightSyncError, RuntimeError, ImportError) as error:
            way = "use the broadcast or reshard transport"
            found.append(Finding(f"export from cuda:{index}", "fail", str(error), way))
            continue
        block.copy_(torch.arange(_PROBE_BYTES, dtype=torch.int64).to(torch.uint8))
        torch.cuda.synchronize(device)
        kept.append(block)
        handles.append(handle)
        names.append(f"another process reads cuda:{index} on cuda:0")
        found.append(_export_of_torch(device))
    if handles:
        answers = ask_peer("", handles, "cuda:0")
        found += [
            Finding(name, answer.level, answer.text, answer.remedy)
            for name, answer in zip(names, answers, strict=True)
        ]
    return found


def _export_of_torch(device: torch.device) -> Finding:
    name = f"export of torch memory on cuda:{device.index}"
    try:
        share_cuda(torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device))
    except WeightSyncError as error:
        way = "weights are staged through a buffer, exact but slower"
        return Finding(name, "warn", str(error), way)
    return Finding(name, "ok", "read in place, no copy on the trainer's side")
