"""``python -m bench plan``: how long planning takes and what a plan costs, at any scale, no GPU."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import msgspec
import numpy as np

from bench.parallelism import Parallelism, parse
from bench.plan_model import describe, names
from bench.plan_sides import manifests, recordings
from weight_sync.buckets import ALIGN, cut
from weight_sync.membership import Membership
from weight_sync.plan import Plan, build_plan

TRAINER_KINDS = ("dp", "fsdp", "tp", "pp", "ep")


def run_plan(
    model: str, trainer: Parallelism, engine: Parallelism, link_gbps: float = 50.0
) -> dict[str, object]:
    """Plans one refit between fleets that exist only as shapes.

    Args:
        model: Name known to ``plan_model``.
        trainer: Ranks of the trainer; ``dp`` replicates, ``fsdp`` shards.
        engine: Ranks of all engine shards together; ``dp`` is the number of shards.
        link_gbps: Gigabytes (1e9 bytes) per second that one rank's link moves in one direction.

    Returns:
        ``plan_seconds`` covers plan, digest, and every rank's encoded program.
        ``plan_bytes_per_rank_max`` is the largest of these programs. ``messages`` are the packed
        buckets of all pairs. ``sender_imbalance`` is the busiest sender over the mean of those that
        send. ``floor_seconds`` is the time the busiest link needs under this plan,
        ``broadcast_floor_seconds`` that of a link that takes in the whole model.

    Raises:
        ConfigError: If the model is unknown.
        LayoutError: If the two sides do not fit the model.
    """
    shape = describe(model)
    held, wanted = manifests(shape, trainer), recordings(shape, engine)
    membership = Membership(1, trainer.ranks, tuple(range(engine.dp)), engine.tp * engine.pp)
    encoder = msgspec.msgpack.Encoder()
    start = time.perf_counter()
    plan = build_plan(membership, held, wanted)
    largest = 0
    for worker in range(membership.workers):
        largest = max(largest, len(encoder.encode(plan.receiver_program(worker))))
    for rank in range(trainer.ranks):
        largest = max(largest, len(encoder.encode(plan.sender_program(rank))))
    seconds = time.perf_counter() - start
    sent = plan.sender_bytes()
    received = [int(plan.pieces[c].nbytes.sum()) for c in plan.worker_class]
    link = link_gbps * 1e9
    return {
        "model": model,
        "trainer": str(trainer),
        "engine": str(engine),
        "plan_seconds": seconds,
        "plan_bytes_per_rank_max": largest,
        "bytes_sent": plan.bytes_sent,
        "bytes_needed": _needed(plan),
        "messages": _messages(plan),
        "sender_imbalance": float(sent.max() / sent[sent > 0].mean()),
        "floor_seconds": max(int(sent.max()), *received) / link,
        "broadcast_floor_seconds": shape.nbytes / link,
    }


def _needed(plan: Plan) -> int:
    """Bytes of all recorded slices of all workers, without looking at the plan's pieces."""
    per_class = []
    sizes = dict(zip(plan.catalogue.index, plan.catalogue.itemsizes().tolist(), strict=True))
    for recording in plan.recordings:
        itemsize = np.array([sizes[s.name] for s in recording.sources], np.int64)
        elements = recording.size.unpack().astype(np.int64).prod(axis=1)
        per_class.append(int((elements * itemsize[recording.source.unpack()]).sum()))
    return sum(per_class[c] for c in plan.worker_class)


def _messages(plan: Plan) -> int:
    """Packed buckets of all pairs of sender and worker."""
    count = 0
    for worker, c in enumerate(plan.worker_class):
        order = np.argsort(plan.senders[worker], kind="stable")
        nbytes = plan.pieces[c].nbytes[order]
        first = np.flatnonzero(np.diff(plan.senders[worker][order], prepend=-1))
        # Most pairs fill less than one bucket; only the others need to be cut.
        full = np.add.reduceat(nbytes + ALIGN, first) > plan.bucket_bytes
        count += len(first) - int(full.sum())
        for part in np.split(nbytes, first[1:]) if full.any() else ():
            if (part + ALIGN).sum() > plan.bucket_bytes:
                alone = np.full(len(part), -1, np.int32)
                count += cut(part, alone, plan.bucket_bytes).count
    return count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``plan``."""
    parser.add_argument("--model", default="deepseek-v3", choices=names())
    parser.add_argument(
        "--trainer", default="dp=1", help="e.g. dp=2,tp=8,pp=16,ep=16; fsdp=8 shards instead"
    )
    parser.add_argument("--engine", default="tp=1", help="e.g. dp=8,tp=32 or dp=16,tp=16,ep=256")
    parser.add_argument(
        "--link-gbps", type=float, default=50.0, help="gigabytes per second of one rank's link"
    )
    parser.add_argument("--json", type=Path, help="file to write the result to")


def run(args: argparse.Namespace) -> dict[str, object]:
    """Runs the benchmark that the command line asks for."""
    return run_plan(
        args.model, parse(args.trainer, TRAINER_KINDS), parse(args.engine), args.link_gbps
    )


def main() -> None:
    """Runs one benchmark, prints its JSON and writes it where asked."""
    parser = argparse.ArgumentParser(prog="python -m bench.plan", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    text = json.dumps(run(args), indent=2)
    print(text)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
