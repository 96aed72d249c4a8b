"""A real RL loop on a plain Linux box: vLLM generates behind the facade over Ray, FSDP2 trains.

SmolLM2-135M-Instruct learns sums of two digits by GRPO. After every optimizer step the new weights
go into the running engine; at the end its greedy tokens must equal those of a fresh engine, in a
process of its own, that loaded the trainer's saved checkpoint. Run it with ``make demo``; with
``--gpus 2`` two trainer ranks and two engines share two GPUs, and every engine must agree.

Exit status: 0 when every refit was verified, all tokens carry the version of their refit and the
final tokens match, else 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import msgspec

import reward
import smollm2
from records import Result
from rollouts import Engine, local_ray
from trainers import Trainers
from training import Loop

STEPS = 8
CONNECT_DEADLINE_S = 120.0
# Longer than a cache block, so that a stale prefix cache could not go unseen.
FINAL_PROMPTS = (
    "The lighthouse keeper climbed the narrow stairs every evening, lit the great lamp, and wrote "
    "the weather and the names of the passing ships into a thick book. One night he wrote that",
    "A recipe for bread needs flour, water, salt and yeast. First the flour and the salt are mixed "
    "in a large bowl; then the warm water and the yeast are added, and after that",
    reward.SHOTS * 3 + "4 + 5 =",
)


def run(build: Path, gpus: int) -> Result:
    """Trains, refits after every step, and compares the live engines with a fresh one.

    Args:
        build: Directory for the starting checkpoint, kept from run to run.
        gpus: GPUs to use; 0 for none.
    """
    began = time.perf_counter()
    start = smollm2.checkpoint(build / "smollm2")
    prompts = list(FINAL_PROMPTS)
    with tempfile.TemporaryDirectory(prefix="demo-") as scratch:
        saved = Path(scratch) / "trained"
        with local_ray(gpus):
            with Trainers(start, gpus) as trainers, Engine(start, gpus) as engine:
                engine.fleet.prepare_refit_info(trainers.ready())
                (connected,) = engine.fleet.init_ipc_zmq()
                connected.result(CONNECT_DEADLINE_S)
                up = time.perf_counter() - began
                print(f"engine and trainers up and connected after {up:.0f} s", flush=True)
                # Also fills the prefix cache of version 0, which every refit has to drop.
                before = engine.greedy(prompts)
                records = Loop(engine, trainers).run(STEPS)
                trainers.save(saved)
                live = engine.greedy(prompts)
            with Engine(saved, min(gpus, 1)) as engine:
                fresh = [alone for (alone,) in engine.greedy(prompts)]
    changed = sum(a != b for a, b in zip(before, live, strict=True))
    same = all(set(map(tuple, each)) == {tuple(f)} for each, f in zip(live, fresh, strict=True))
    print(f"greedy tokens: {changed} of {len(prompts)} prompts changed since version 0")
    print(f"live engine equals a fresh one loaded from the trainer's checkpoint: {same}")
    print(f"total {time.perf_counter() - began:.0f} s")
    return Result(smollm2.MODEL_NAME, records, same)


def main() -> int:
    """Runs the demo and writes its result; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument(
        "--gpus", type=int, default=0, help="trainer ranks and engines, one of each on every GPU"
    )
    options = parser.parse_args()
    out: Path = options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    result = run(out.parent.resolve(), options.gpus)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return 0 if result.good else 1


if __name__ == "__main__":
    sys.exit(main())
