"""Model shapes by name: configurations, checkpoint names and random checkpoints.

The named shapes are those of public models; ``tiny*`` are small enough for two CPU cores.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

Config = dict[str, object]

_QWEN3: Config = {
    "vocab_size": 151936,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rope_theta": 1000000,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TINY: Config = {
    "vocab_size": 100,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, Config] = {
    "tiny": {
        **_TINY,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "intermediate_size": 192,
    },
    "tiny-tied": {
        **_TINY,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "intermediate_size": 192,
        "tie_word_embeddings": True,
    },
    "tiny-moe": {
        **_TINY,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "intermediate_size": 192,
        "moe_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    },
    # Wide enough for 128x128 blocks in every shard of two.
    "tiny-fp8": {
        **_TINY,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 256,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
    },
    "tiny-fp8-moe": {
        **_TINY,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 256,
        "head_dim": 64,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    },
    "smollm2-135m": {
        **_TINY,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}


def config(name: str, layers: int | None = None) -> Config:
    """Configuration of a named model, optionally with fewer layers.

    Raises:
        KeyError: With the known names.
    """
    if name not in CONFIGS:
        raise KeyError(f"unknown model {name!r}; known: {', '.join(CONFIGS)}")
    out = dict(CONFIGS[name])
    if layers is not None:
        out["num_hidden_layers"] = layers
    return out


def shapes(cfg: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Checkpoint names and shapes of a Qwen2, Qwen3 or Qwen3-MoE configuration."""
    hidden, heads = int(cfg["hidden_size"]), int(cfg["num_attention_heads"])  # type: ignore[call-overload]
    kv = int(cfg["num_key_value_heads"])  # type: ignore[call-overload]
    head_dim = int(cfg.get("head_dim", hidden // heads))  # type: ignore[call-overload]
    vocab = int(cfg["vocab_size"])  # type: ignore[call-overload]
    biased = cfg["model_type"] == "qwen2"
    normed = str(cfg["model_type"]).startswith("qwen3")
    yield "model.embed_tokens.weight", (vocab, hidden)
    for i in range(int(cfg["num_hidden_layers"])):  # type: ignore[call-overload]
        p = f"model.layers.{i}."
        yield p + "input_layernorm.weight", (hidden,)
        for proj, rows in (("q", heads), ("k", kv), ("v", kv)):
            yield p + f"self_attn.{proj}_proj.weight", (rows * head_dim, hidden)
            if biased:
                yield p + f"self_attn.{proj}_proj.bias", (rows * head_dim,)
        yield p + "self_attn.o_proj.weight", (hidden, heads * head_dim)
        if normed:
            yield p + "self_attn.q_norm.weight", (head_dim,)
            yield p + "self_attn.k_norm.weight", (head_dim,)
        yield p + "post_attention_layernorm.weight", (hidden,)
        if "num_experts" in cfg:
            experts, inner = int(cfg["num_experts"]), int(cfg["moe_intermediate_size"])  # type: ignore[call-overload]
            yield p + "mlp.gate.weight", (experts, hidden)
            for e in range(experts):
                yield p + f"mlp.experts.{e}.gate_proj.weight", (inner, hidden)
                yield p + f"mlp.experts.{e}.up_proj.weight", (inner, hidden)
                yield p + f"mlp.experts.{e}.down_proj.weight", (hidden, inner)
        else:
            inner = int(cfg["intermediate_size"])  # type: ignore[call-overload]
            yield p + "mlp.gate_proj.weight", (inner, hidden)
            yield p + "mlp.up_proj.weight", (inner, hidden)
            yield p + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not cfg["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def m251(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Element k is ``(crc32(name) + k) mod 251``: exact in bf16, distinct in every place."""
    count = torch.arange(int(torch.tensor(shape).prod()) if shape else 1, dtype=torch.int64)
    return ((zlib.crc32(name.encode()) + count) % 251).to(torch.bfloat16).reshape(shape)


def random_weights(
    cfg: Config, seed: int, device: str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Random weights of a believable scale; the same seed gives the same values on one device."""
    generator = torch.Generator(device=device).manual_seed(seed)
    out = {}
    for name, shape in shapes(cfg):
        tensor = torch.empty(shape, dtype=dtype, device=device)
        tensor.normal_(0.0, 0.05, generator=generator)
        if name.endswith("norm.weight"):
            tensor.add_(1.0)
        out[name] = tensor
    return out


def write_config(cfg: Config, folder: Path) -> Path:
    """Writes ``config.json`` and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(cfg))
    return folder


def write_checkpoint(cfg: Config, weights: dict[str, torch.Tensor], folder: Path) -> Path:
    """Writes an ordinary safetensors checkpoint."""
    write_config(cfg, folder)
    plain = {n: t.detach().cpu().contiguous() for n, t in weights.items()}
    save_file(plain, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
