"""``python -m bench refit``: real vLLM worker, real trainer process, both systems in one run."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.limits import Limit, measure_plan
from bench.models import CONFIGS, config, random_weights, shapes, write_checkpoint, write_config
from weight_sync.report import RefitReport

ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


RIVALS = ("vllm-native", "checkpoint-engine")


@dataclass(frozen=True)
class Options:
    """What one benchmark runs."""

    model: str
    layers: int | None
    device: str
    transport: str
    trainer_devices: tuple[str, ...]
    engine_tp: int
    against: tuple[str, ...]
    repeat: int
    memory: float
    quantize: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command line of ``refit``."""
    parser.add_argument("--model", default="tiny", choices=sorted(CONFIGS))
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--transport", default="ipc", choices=("ipc", "broadcast", "reshard"))
    parser.add_argument("--trainer", default="dp=1", help="e.g. dp=2 (FSDP2 over two ranks)")
    parser.add_argument("--engine", default="tp=1", help="e.g. tp=2")
    parser.add_argument(
        "--trainer-devices", help="comma separated, e.g. cuda:1; default: the engine's device"
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
    trainer = dict(part.split("=") for part in args.trainer.split(","))
    engine = dict(part.split("=") for part in args.engine.split(","))
    unknown = set(trainer) - {"dp", "tp", "pp", "ep"} | set(engine) - {"tp", "dp"}
    if unknown or any(int(trainer.get(k, 1)) != 1 for k in ("tp", "pp", "ep")):
        sys.exit("refit runs trainers with dp=N (FSDP2); other grids: python -m bench plan")
    ranks = int(trainer.get("dp", 1))
    if args.trainer_devices:
        devices = tuple(args.trainer_devices.split(","))
    else:
        devices = tuple(f"cuda:{i}" if args.device == "cuda" else "cpu" for i in range(ranks))
    if len(devices) != ranks:
        sys.exit(f"--trainer has {ranks} ranks but --trainer-devices names {len(devices)}")
    rivals = tuple(a for a in args.against.split(",") if a)
    tp = int(engine.get("tp", 1))
    if set(rivals) - set(RIVALS):
        sys.exit(f"--against knows {', '.join(RIVALS)}")
    if rivals and (ranks > 1 or tp > 1):
        sys.exit("--against works with one trainer rank and one engine worker")
    if "checkpoint-engine" in rivals and devices != ("cuda:0",):
        sys.exit("checkpoint-engine shares the engine's GPU: leave out --trainer-devices")
    return Options(
        args.model,
        args.layers,
        args.device,
        args.transport,
        devices,
        tp,
        rivals,
        args.repeat,
        args.memory,
        args.quantize,
    )


def run(options: Options) -> dict[str, object]:
    """Runs the benchmark and returns its JSON object."""
    for key, value in ENGINE_ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    if options.engine_tp > 1:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if options.quantize:
        from bench.quantized_refit import run_quantized

        return run_quantized(options)
    cfg = config(options.model, options.layers)
    with tempfile.TemporaryDirectory() as folder:
        llm = start_engine(options, cfg, Path(folder))
        return measure_engine(options, cfg, llm)


def start_engine(
    options: Options, cfg: dict[str, object], folder: Path, **engine: object
) -> object:
    """An engine of a configuration; on GPUs its first weights are vLLM's own dummies."""
    import vllm

    from weight_sync.vllm.worker_extension import EXTENSION

    cuda = options.device == "cuda"
    if cuda:
        write_config(cfg, folder)
    else:
        write_checkpoint(cfg, random_weights(cfg, 0), folder)
    extra: dict[str, object] = {}
    extension = EXTENSION
    if cuda:
        extra["load_format"] = "dummy"
        extra["gpu_memory_utilization"] = options.memory
        if "vllm-native" in options.against:
            from vllm.config import WeightTransferConfig

            backend = "ipc" if options.trainer_devices[0] == "cuda:0" else "nccl"
            extra["weight_transfer_config"] = WeightTransferConfig(backend=backend)
        if "checkpoint-engine" in options.against:
            extension = "bench.checkpoint_engine_worker.BothExtensions"
    return vllm.LLM(
        str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=8,
        tensor_parallel_size=options.engine_tp,
        worker_extension_cls=extension,
        **extra,
        **engine,
    )


def measure_engine(options: Options, cfg: dict[str, object], llm: object) -> dict[str, object]:
    """Refits an engine again and again, with ours and with what it is compared with."""
    from bench.group_limit import measure_group
    from bench.native import CheckpointEngine, NativeIpc, NativeNccl, NativeReload, NativeSystem
    from bench.trainer_process import BenchTrainer, TrainerProcesses
    from weight_sync.engine import LocalLLM
    from weight_sync.synchronizer import WeightSynchronizer
    from weight_sync.transports.registry import GROUPED

    engine_device = "cuda:0" if options.device == "cuda" else "cpu"
    tp = options.engine_tp
    with TrainerProcesses(BenchTrainer(cfg, options.trainer_devices, options.device)) as trainers:
        natives: list[NativeSystem] = []
        if "vllm-native" in options.against:
            if options.device == "cpu":
                natives.append(NativeReload(llm, cfg))
            elif options.trainer_devices[0] == "cuda:0":
                natives.append(NativeIpc(llm, trainers))
            else:
                natives.append(NativeNccl(llm, trainers, cfg))
        if "checkpoint-engine" in options.against:
            natives.append(CheckpointEngine(llm, trainers))
        sync = WeightSynchronizer(
            trainers.infos, [LocalLLM(llm)], transport=options.transport, deadline_s=300
        )
        before = _free_memory(options)
        sync.init_communicator()
        version = 1
        trainers.ask("publish", version)
        print(sync.sync_weights(version).line(), file=sys.stderr, flush=True)
        after = _free_memory(options)
        if options.transport in GROUPED:
            limit = measure_group(trainers, options.trainer_devices, engine_device)
        else:
            workers = [f"cuda:{i}" if options.device == "cuda" else "cpu" for i in range(tp)]
            assert sync.plan is not None
            limit = measure_plan(sync.plan, options.trainer_devices, workers)
        reports: list[RefitReport] = []
        plain: list[RefitReport] = []
        native_seconds: dict[str, list[float]] = {n.name: [] for n in natives}
        for _ in range(options.repeat + 1):
            for verify in (True, False):
                version += 1
                trainers.ask("publish", version)
                report = sync.sync_weights(version, verify=verify)
                (reports if verify else plain).append(report)
                print(report.line(), file=sys.stderr, flush=True)
            for native in natives:
                native_seconds[native.name].append(native.refit())
                print(
                    f"{native.name}: {native_seconds[native.name][-1] * 1e3:.1f} ms",
                    file=sys.stderr,
                    flush=True,
                )
        # A native refit between ours must not have left the engine with other weights.
        version += 1
        trainers.ask("publish", version)
        final = sync.sync_weights(version)
        sync.shutdown()
    return _result(
        options, cfg, limit, reports[1:], plain[1:], native_seconds, before - after, final.verified
    )


def _free_memory(options: Options) -> int:
    if options.device != "cuda":
        return 0
    import torch

    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(0)[0])


def _median(values: list[float]) -> float:
    return statistics.median(values)


def _result(
    options: Options,
    cfg: dict[str, object],
    limit: Limit,
    verified: list[RefitReport],
    plain: list[RefitReport],
    natives: dict[str, list[float]],
    extra_bytes: int,
    final: bool,
) -> dict[str, object]:
    nbytes = verified[0].bytes
    runs = []
    for name, group in (("weight_sync", verified), ("weight_sync unverified", plain)):
        wire = _median([r.seconds["transfer"] for r in group])
        gbps = nbytes / 1e9 / wire / options.engine_tp
        if gbps > limit.gbps:
            sys.exit(
                f"{name}: {gbps:.0f} GB/s is above the {limit.kind} limit of {limit.gbps:.0f} GB/s "
                "measured in this run; the figure is wrong"
            )
        runs.append(
            {
                "system": name,
                "transport": options.transport,
                "median_ms": _median([r.total_seconds for r in group]) * 1e3,
                "wire_ms": wire * 1e3,
                "pause_ms": _median([r.pause_seconds for r in group]) * 1e3,
                "overhead_ms": _median([r.overhead_seconds for r in group]) * 1e3,
                "stages_ms": {
                    s: _median([r.seconds.get(s, 0.0) for r in group]) * 1e3
                    for s in group[0].seconds
                },
                "gbps": gbps,
                "fraction_of_limit": gbps / limit.gbps,
                "verified": name == "weight_sync" and final and all(r.verified for r in group),
                "modes": group[0].modes,
                "extra_memory_mb": extra_bytes / 2**20,
            }
        )
    ratios = {}
    for name, seconds in natives.items():
        median = _median(seconds[1:])
        runs.append({"system": name, "transport": name.split()[1], "median_ms": median * 1e3})
        ratios[name] = median / _median([r.total_seconds for r in verified])
    return {
        "model": options.model,
        "layers": options.layers or cfg["num_hidden_layers"],
        "tensors": len(list(shapes(cfg))),
        "bytes": nbytes,
        "device": _device_name(options),
        "trainer_devices": list(options.trainer_devices),
        "engine_tp": options.engine_tp,
        "limit": {"kind": limit.kind, "gbps": limit.gbps},
        "runs": runs,
        "ratios": ratios,
        "command": "python -m bench " + shlex.join(sys.argv[1:]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "versions": _versions(),
    }


def _device_name(options: Options) -> str:
    if options.device == "cuda":
        import torch

        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _versions() -> dict[str, str]:
    import torch
    import vllm

    out = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
    }
    if torch.cuda.is_available():
        out["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        out["cuda"] = str(torch.version.cuda)
    return out


def plot(result: dict[str, object], path: Path) -> None:
    """Bar chart of medians."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = result["runs"]
    assert isinstance(runs, list)
    figure, axes = pyplot.subplots(figsize=(7, 0.6 * len(runs) + 1.2))
    axes.barh([r["system"] for r in runs], [r["median_ms"] for r in runs], color="#4477aa")
    axes.set_xlabel("median refit, ms")
    axes.set_title(f"{result['model']}, {result['device']}, {result['date']}")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
