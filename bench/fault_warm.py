"""Imported once by the server that the matrix forks its processes from.

What a first recording imports and a first copy compiles would otherwise be paid by every process
that replaces a dead one, and counted against the deadline of its first refit.
"""

from __future__ import annotations

import torch
import torch._dynamo

import bench.fault_processes  # noqa: F401
from tests.harness.sources import BoxSource, whole
from tests.harness.standin import StandinModel, Unit, copies
from weight_sync.manifest import build_catalogue
from weight_sync.trainer.export import collect
from weight_sync.trainer.hashing import compile_replica_hash
from weight_sync.worker.recorded import make_recording


def warm() -> None:
    """Records and hashes one small tensor; starts no thread, so that forking stays safe."""
    tensor = torch.zeros(4, 4, dtype=torch.bfloat16)
    source = BoxSource({"t": whole(tensor)})
    manifest = source.manifest(0, "host", "cpu")
    unit = Unit("t", {"weight": ((4, 4), torch.bfloat16)})
    model = StandinModel([unit], {"t": [("t", copies("weight"))]}).load({"t": tensor})
    make_recording(model, build_catalogue([manifest]).tensors, ())
    compile_replica_hash(manifest, collect(source.regions)).run()


warm()
