"""``python -m bench refit``: real vLLM workers, real trainer processes, both systems in one run."""

from __future__ import annotations

import tempfile
from pathlib import Path

from bench.engines import ProcessFleet, prepare_environment, start_engine
from bench.measure import measure_engine, measure_fleet
from bench.models import config
from bench.options import Options, add_arguments, parse
from bench.quantized_refit import run_quantized
from bench.result_json import plot

__all__ = ["Options", "add_arguments", "parse", "plot", "run"]


def run(options: Options) -> dict[str, object]:
    """Runs the benchmark and returns its JSON object."""
    prepare_environment()
    if options.quantize:
        return run_quantized(options)
    cfg = config(options.model, options.layers)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.engine.dp == 1:
            return measure_engine(options, cfg, start_engine(options, cfg, folder))
        with ProcessFleet(options, cfg, folder) as fleet:
            return measure_fleet(options, cfg, fleet)
