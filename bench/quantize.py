"""How fast quantizing is, next to a plain copy on the same GPU: ``python -m bench.quantize``.

Rates count the bytes that memory must move, read plus written, for both: a copy moves every byte
twice; MXFP8 from bf16 reads 2 bytes and writes 1 + 1/32 per element. FP8 per tensor reads twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from weight_sync.quantize.compiler import compile_quantize
from weight_sync.quantize.format import Format, scale_dtype, scale_shape
from weight_sync.quantize.work import Work

_READS = {Format.MXFP8: 1, Format.FP8_BLOCK: 1, Format.FP8_TENSOR: 2}
# Two matrices of an 8B model, and one layer of 128 experts.
_SHAPES = {"mlp": (12288, 4096), "attention": (4096, 4096), "experts": (128, 1536, 2048)}


@dataclass(frozen=True)
class Rate:
    """One measured case.

    Attributes:
        format: What the source was quantized to.
        source: Its dtype.
        shape: Which tensors.
        median_ms: Of one run over the whole batch.
        gbps: Bytes read and written per second, in 1e9.
        fraction_of_copy: ``gbps`` over that of the copy.
        wire_fraction: Bytes of values and scales over bytes of the same tensors in bf16.
    """

    format: str
    source: str
    shape: str
    median_ms: float
    gbps: float
    fraction_of_copy: float
    wire_fraction: float


def measure(gib: float = 2.0, repeat: int = 20) -> dict[str, object]:
    """Measures the copy limit and every format.

    Args:
        gib: Size of each batch's sources; several times the L2 cache, or the figures are of that.
        repeat: Timed runs, of which the median counts.

    Raises:
        EnvironmentUnsupportedError: If this GPU cannot quantize.
        RuntimeError: If a rate is above the copy's by more than noise: then the figure is wrong.
    """
    limit = _copy_gbps(gib, repeat)
    rates = [
        _rate(form, dtype, label, gib, repeat, limit)
        for form in Format
        for dtype in (torch.bfloat16, torch.float32)
        for label in _SHAPES
    ]
    for rate in rates:
        if rate.fraction_of_copy > 1.1:
            raise RuntimeError(f"{rate} is faster than memory; the batch was too small to measure")
    return {
        "device": torch.cuda.get_device_name(),
        "copy_gbps": limit,
        "runs": [asdict(r) for r in rates],
    }


def _median_ms(run: Callable[[], object], repeat: int) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(repeat):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def _copy_gbps(gib: float, repeat: int) -> float:
    source = torch.zeros(int(gib * 2**30), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_ms(lambda: target.copy_(source), repeat) / 1e6


def _rate(
    form: Format, dtype: torch.dtype, label: str, gib: float, repeat: int, limit: float
) -> Rate:
    shape = _SHAPES[label]
    each = torch.Size(shape).numel() * dtype.itemsize
    works = [_work(form, dtype, shape, i) for i in range(max(1, round(gib * 2**30 / each)))]
    program = compile_quantize(form, works)
    ms = _median_ms(program.run, repeat)
    program.check()
    sources = sum(w.source.nbytes for w in works)
    gbps = (_READS[form] * sources + program.nbytes) / ms / 1e6
    bf16 = 2 * sum(w.source.numel() for w in works)
    name = str(dtype).removeprefix("torch.")
    return Rate(form.value, name, label, ms, gbps, gbps / limit, program.nbytes / bf16)


def _work(form: Format, dtype: torch.dtype, shape: tuple[int, ...], number: int) -> Work:
    source = torch.randn(shape, device="cuda", dtype=dtype) * 0.02
    return Work(
        f"{number}",
        source,
        torch.empty(shape, dtype=torch.uint8, device="cuda"),
        torch.empty(
            scale_shape(form, shape), dtype=getattr(torch, scale_dtype(form)), device="cuda"
        ),
    )


def main() -> None:
    """Prints a table, and writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gib", type=float, default=2.0, help="source bytes per batch")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options.gib, options.repeat)
    print(f"{result['device']}: copy {result['copy_gbps']:.0f} GB/s read + written")
    runs = result["runs"]
    assert isinstance(runs, list)
    for run in runs:
        print(
            f"{run['format']:>10} {run['source']:>8} {run['shape']:>9}: {run['median_ms']:7.3f} ms "
            f"{run['gbps']:6.0f} GB/s {run['fraction_of_copy']:6.1%} of copy, "
            f"{run['wire_fraction']:.1%} of bf16 bytes"
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
