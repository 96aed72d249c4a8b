"""``python -m bench refit --quantize``: quantized engines beside a bf16 one, in the same run.

Three engines, one after the other, take the same versions from trainers that hold bf16:

- ``bf16``: as without the option.
- ``checkpoint``: serves a quantized checkpoint, so the trainer quantizes before the wire.
- ``online``: takes bf16 and quantizes by itself, which is all that vLLM's own engines can refit.
"""

from __future__ import annotations

import gc
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.engines import start_engine
from bench.keep import keep
from bench.measure import measure_engine
from bench.models import Config, config, shapes
from bench.options import Options
from bench.provenance import provenance
from bench.quantized_models import FORMATS, is_quantized, quantized_config

_KINDS = ("bf16", "checkpoint", "online")
_PROMPTS = [[(7 * i + 13 * j) % 97 + 3 for j in range(64)] for i in range(8)]


def run_quantized(options: Options) -> dict[str, object]:
    """Runs all three and returns one JSON object.

    Raises:
        SystemExit: Naming what is wrong with the options.
    """
    if options.quantize not in FORMATS:
        sys.exit(f"--quantize must be one of {', '.join(FORMATS)}, not {options.quantize!r}")
    if options.device != "cuda":
        sys.exit("--quantize needs --device cuda: vLLM has no quantized kernels for CPUs")
    cfg = config(options.model, options.layers)
    engines: dict[str, dict[str, Any]] = {}
    scores: dict[str, list[float]] = {}
    for number, kind in enumerate(_KINDS):
        print(f"--- {kind}", file=sys.stderr, flush=True)
        engines[kind], scores[kind] = _one(options, cfg, kind)
        left = _KINDS[number + 1 :]
        keep(options.json, {"model": options.model, "engines": engines, "unfinished": left})
    ratios: dict[str, float] = {}
    for transport in options.transports:
        took = {kind: _verified_ms(engine, transport) for kind, engine in engines.items()}
        for kind in ("bf16", "online"):
            ratios[f"{transport}: {kind} over checkpoint"] = took[kind] / took["checkpoint"]
    ours = _verified_ms(engines["checkpoint"], options.transports[0])
    for run in engines["online"]["runs"]:
        if not run["system"].startswith("weight_sync"):
            # What vLLM itself offers for such an engine.
            ratios[f"{run['system']}, online, over checkpoint"] = run["median_ms"] / ours
    return {
        "model": options.model,
        "quantize": options.quantize,
        "wire_fraction": engines["checkpoint"]["bytes"] / engines["bf16"]["bytes"],
        "wire_fraction_of_matrices": _matrices(cfg, engines),
        "logprob_gap": {kind: _gap(scores["bf16"], scores[kind]) for kind in scores},
        "ratios": ratios,
        "engines": engines,
        **provenance(),
    }


def _one(options: Options, cfg: Config, kind: str) -> tuple[dict[str, Any], list[float]]:
    """One engine: its measurements, and log-probabilities after the last version."""
    import torch

    served = quantized_config(cfg, FORMATS[options.quantize]) if kind == "checkpoint" else cfg
    # A checkpoint's engine cannot take bf16 from vLLM's own senders: there is nothing to compare.
    rivals = () if kind == "checkpoint" else options.against
    mine = replace(options, against=rivals, json=None)
    extra = {"quantization": _online(options.quantize)} if kind == "online" else {}
    with tempfile.TemporaryDirectory() as folder:
        llm = start_engine(mine, served, Path(folder), **extra)
        result = measure_engine(mine, cfg, llm)
        scores = _scores(llm)
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return result, scores


def _verified_ms(engine: dict[str, Any], transport: str) -> float:
    """Median of the verified refits over a transport."""
    found = (r for r in engine["runs"] if r["transport"] == transport)
    return float(next(r["median_ms"] for r in found if r["system"] == "weight_sync"))


def _online(form: str) -> str:
    return {"mxfp8": "mxfp8", "fp8": "fp8_per_block", "fp8-tensor": "fp8"}[form]


def _scores(llm: Any) -> list[float]:  # noqa: ANN401
    """Log-probability of every prompt token but the first ones."""
    from vllm import SamplingParams

    llm.reset_prefix_cache()
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in _PROMPTS],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False),
        use_tqdm=False,
    )
    return [
        step[token].logprob
        for prompt, output in zip(_PROMPTS, outputs, strict=True)
        for token, step in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
    ]


def _gap(base: list[float], other: list[float]) -> float:
    """Mean absolute difference."""
    return math.fsum(abs(a - b) for a, b in zip(base, other, strict=True)) / len(base)


def _matrices(cfg: Config, engines: dict[str, dict[str, Any]]) -> float:
    """Bytes of quantized matrices, scales included, over their bytes in bf16."""
    total, quantized = 0, 0
    for name, shape in shapes(cfg):
        total += math.prod(shape)
        quantized += math.prod(shape) if is_quantized(name) else 0
    sent = engines["checkpoint"]["bytes"] - 2 * (total - quantized)
    return sent / (2 * quantized)
