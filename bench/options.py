"""The command line of ``python -m bench refit``, checked before anything starts."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.grids import (
    EngineGrid,
    TrainerGrid,
    check_devices,
    engine_devices,
    engine_grid,
    trainer_devices,
    trainer_grid,
)
from bench.models import CONFIGS, config
from weight_sync.errors import ConfigError
from weight_sync.transports.registry import GROUPED

RIVALS = ("vllm-native", "checkpoint-engine")
TRANSPORTS = ("ipc", *GROUPED)


@dataclass(frozen=True)
class Options:
    """What one benchmark runs.

    Attributes:
        model: Name of the model.
        layers: Fewer layers than the model has, or None.
        device: ``"cpu"`` or ``"cuda"``.
        transports: One after the other, with the same engines and trainers.
        trainer: Trainer ranks.
        engine: Engine workers.
        trainer_devices: Device of each trainer rank.
        against: What runs beside it.
        repeat: Timed refits of each kind.
        memory: ``gpu_memory_utilization``.
        quantize: Format of quantized engines, or empty.
        json: Where to keep what is measured so far, or None.
    """

    model: str
    layers: int | None
    device: str
    transports: tuple[str, ...]
    trainer: TrainerGrid
    engine: EngineGrid
    trainer_devices: tuple[str, ...]
    against: tuple[str, ...]
    repeat: int
    memory: float
    quantize: str = ""
    json: Path | None = None

    @property
    def engine_devices(self) -> tuple[str, ...]:
        """Device of each worker, shard by shard."""
        return engine_devices(self.engine, self.device)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``refit``."""
    parser.add_argument("--model", default="tiny", choices=sorted(CONFIGS))
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--transport", default="ipc", help=f"comma separated: {', '.join(TRANSPORTS)}"
    )
    parser.add_argument(
        "--trainer",
        default="dp=1",
        help="dp=N (FSDP2), or a product such as pp=2,ep=2 or pp=2,tp=2",
    )
    parser.add_argument(
        "--engine",
        default="tp=1",
        help="e.g. tp=2; dp=M for M shards, ep=N for whole experts on each worker of a shard",
    )
    parser.add_argument(
        "--trainer-devices",
        help="comma separated, e.g. cuda:1; default: with ipc the engine's GPUs, else those after",
    )
    parser.add_argument("--against", default="", help=f"comma separated: {', '.join(RIVALS)}")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--quantize", default="", help="mxfp8, fp8 or fp8-tensor: such engines beside a bf16 one"
    )
    parser.add_argument("--memory", type=float, default=0.3, help="gpu_memory_utilization")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path, help="bar chart as PNG (needs matplotlib)")


def parse(args: argparse.Namespace) -> Options:
    """Checks the arguments.

    Raises:
        SystemExit: Naming what is wrong.
    """
    try:
        options = _options(args)
        if options.device == "cuda":
            import torch

            devices = (*options.engine_devices, *options.trainer_devices)
            check_devices(devices, torch.cuda.device_count())
    except ConfigError as error:
        sys.exit(str(error))
    return options


def _options(args: argparse.Namespace) -> Options:
    cfg = config(args.model, args.layers)
    transports = tuple(part for part in args.transport.split(",") if part)
    if not transports or set(transports) - set(TRANSPORTS):
        raise ConfigError(f"--transport {args.transport!r}: write some of {', '.join(TRANSPORTS)}")
    trainer, engine = trainer_grid(args.trainer, cfg), engine_grid(args.engine, cfg)
    shared = set(transports) == {"ipc"}
    devices = trainer_devices(args.trainer_devices, trainer, engine, args.device, shared)
    rivals = tuple(part for part in args.against.split(",") if part)
    options = Options(
        args.model,
        args.layers,
        args.device,
        transports,
        trainer,
        engine,
        devices,
        rivals,
        args.repeat,
        args.memory,
        args.quantize,
        args.json,
    )
    _check_sharing(options)
    _check_rivals(options)
    return options


def _check_sharing(options: Options) -> None:
    used = (*options.engine_devices, *options.trainer_devices)
    grouped = [t for t in options.transports if t in GROUPED]
    if options.device == "cuda" and grouped and len(set(used)) < len(used):
        raise ConfigError(
            f"{grouped[0]} needs a GPU for every trainer rank and every engine worker, but "
            f"trainers are on {', '.join(options.trainer_devices)} and workers on "
            f"{', '.join(options.engine_devices)}; NCCL takes a GPU once"
        )
    if options.quantize and options.engine.workers > 1:
        raise ConfigError("--quantize works with one engine worker")


def _check_rivals(options: Options) -> None:
    rivals = options.against
    if set(rivals) - set(RIVALS):
        raise ConfigError(f"--against knows {', '.join(RIVALS)}")
    single = options.trainer.ranks == options.engine.workers == 1
    apart = not set(options.trainer_devices) & set(options.engine_devices)
    if "checkpoint-engine" in rivals and not (single and options.trainer_devices == ("cuda:0",)):
        raise ConfigError(
            "checkpoint-engine needs one trainer rank on the engine's GPU: leave out "
            "--trainer-devices, --trainer and --engine"
        )
    if "vllm-native" in rivals and not single and not (options.device == "cuda" and apart):
        raise ConfigError(
            "with several ranks --against vllm-native is its nccl engine, which needs --device "
            "cuda and trainers on other GPUs than the engine's"
        )
