"""Checkpoint names and shapes of DeepSeek-V3 (671 billion parameters) in bf16.

Sizes are those of the public model configuration. The multi-token prediction layer is left out, as
engines that do not speculate do not load it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class DeepSeekShape:
    """Sizes of a DeepSeek-V3-like model."""

    layers: int = 61
    dense_layers: int = 3
    hidden: int = 7168
    vocabulary: int = 129280
    heads: int = 128
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    query_rank: int = 1536
    kv_rank: int = 512
    dense_inter: int = 18432
    experts: int = 256
    expert_inter: int = 2048
    shared_experts: int = 1


DEEPSEEK_V3 = DeepSeekShape()
# The same structure, small enough for brute force.
TINY_DEEPSEEK = DeepSeekShape(
    layers=4,
    dense_layers=1,
    hidden=16,
    vocabulary=100,
    heads=4,
    nope_dim=4,
    rope_dim=2,
    value_dim=4,
    query_rank=6,
    kv_rank=5,
    dense_inter=24,
    experts=8,
    expert_inter=8,
)


def shapes(model: DeepSeekShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in checkpoint order."""
    hidden = model.hidden
    yield "model.embed_tokens.weight", (model.vocabulary, hidden)
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield from _attention(model, prefix + "self_attn.")
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if layer < model.dense_layers:
            yield from _mlp(prefix + "mlp.", hidden, model.dense_inter)
            continue
        yield prefix + "mlp.gate.weight", (model.experts, hidden)
        yield prefix + "mlp.gate.e_score_correction_bias", (model.experts,)
        for expert in range(model.experts):
            yield from _mlp(f"{prefix}mlp.experts.{expert}.", hidden, model.expert_inter)
        shared = model.shared_experts * model.expert_inter
        yield from _mlp(prefix + "mlp.shared_experts.", hidden, shared)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (model.vocabulary, hidden)


def _attention(model: DeepSeekShape, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "q_a_proj.weight", (model.query_rank, model.hidden)
    yield prefix + "q_a_layernorm.weight", (model.query_rank,)
    query = model.heads * (model.nope_dim + model.rope_dim)
    yield prefix + "q_b_proj.weight", (query, model.query_rank)
    yield prefix + "kv_a_proj_with_mqa.weight", (model.kv_rank + model.rope_dim, model.hidden)
    yield prefix + "kv_a_layernorm.weight", (model.kv_rank,)
    key_value = model.heads * (model.nope_dim + model.value_dim)
    yield prefix + "kv_b_proj.weight", (key_value, model.kv_rank)
    yield prefix + "o_proj.weight", (model.hidden, model.heads * model.value_dim)


def _mlp(prefix: str, hidden: int, inter: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield prefix + "gate_proj.weight", (inter, hidden)
    yield prefix + "up_proj.weight", (inter, hidden)
    yield prefix + "down_proj.weight", (hidden, inter)
