"""What a rank of a Megatron-style trainer holds of a named model: fused, padded, not filled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bench.models import Config, shapes
from weight_sync.sources.megatron import MegatronEntry
from weight_sync.sources.megatron_experts import expert_gate_up, expert_split
from weight_sync.sources.megatron_grid import ParallelGrid
from weight_sync.sources.megatron_layers import (
    fused_gate_up,
    fused_qkv,
    replicated,
    split,
    vocabulary,
)

# Megatron pads vocabularies to a multiple of this per tensor parallel rank.
_PADDING = 128
Make = Callable[[Sequence[int]], torch.Tensor]


def entries(cfg: Config, grid: ParallelGrid, device: torch.device) -> list[MegatronEntry]:
    """Descriptions of a rank's local tensors, which they hold.

    Args:
        cfg: A Qwen2, Qwen3, Llama or Qwen3-MoE configuration.
        grid: The rank's place.
        device: Where tensors are made, in bf16.
    """
    known = dict(shapes(cfg))

    def make(shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=torch.bfloat16, device=device)

    def rows(name: str) -> MegatronEntry:
        shape = known[name]
        step = _PADDING * grid.tp.size
        padded = -(-shape[0] // step) * step
        local = make((padded // grid.tp.size, *shape[1:]))
        return vocabulary(local, name, shape, padded, grid.tp)

    out: list[MegatronEntry] = []
    if grid.pp.rank == 0:
        out.append(rows("model.embed_tokens.weight"))
    for layer in grid.layers(int(cfg["num_hidden_layers"])):  # type: ignore[call-overload]
        out += _layer(cfg, grid, known, f"model.layers.{layer}.", make)
    if grid.pp.rank == grid.pp.size - 1:
        name = "model.norm.weight"
        out.append(replicated(make(known[name]), name, known[name]))
        if "lm_head.weight" in known:
            out.append(rows("lm_head.weight"))
    return out


def stage_patterns(cfg: Config, stage: int, stages: int) -> tuple[str, ...]:
    """Names, or beginnings of names, that a pipeline stage holds; of checkpoints and of vLLM."""
    each = int(cfg["num_hidden_layers"]) // stages  # type: ignore[call-overload]
    out = [f"model.layers.{layer}.*" for layer in range(stage * each, (stage + 1) * each)]
    if stage == 0:
        out.append("model.embed_tokens.*")
    if stage == stages - 1:
        out += ["model.norm.*", "lm_head.*"]
    return tuple(out)


def _layer(
    cfg: Config, grid: ParallelGrid, known: dict[str, tuple[int, ...]], prefix: str, make: Make
) -> list[MegatronEntry]:
    """One transformer layer."""
    heads = int(cfg["num_attention_heads"])  # type: ignore[call-overload]
    kv = int(cfg["num_key_value_heads"])  # type: ignore[call-overload]
    out: list[MegatronEntry] = []
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    for name in [f"{prefix}{norm}.weight" for norm in norms] + [f"{prefix}mlp.gate.weight"]:
        if name in known:
            out.append(replicated(make(known[name]), name, known[name]))
    for kind in ("weight", "bias"):
        query, key, value = (f"{prefix}self_attn.{part}_proj.{kind}" for part in "qkv")
        if query in known:
            (count, *rest), head_dim = known[query], known[key][0] // kv
            local = make(((count + 2 * known[key][0]) // grid.tp.size, *rest))
            names = (query, key, value)
            out.append(
                fused_qkv(local, f"{prefix}qkv.{kind}", names, heads, kv, head_dim, rest, grid.tp)
            )
    name = f"{prefix}self_attn.o_proj.weight"
    out.append(_columns(name, known[name], grid, make))
    if "num_experts" in cfg:
        return out + _experts(int(cfg["num_experts"]), grid, known, f"{prefix}mlp.experts.", make)  # type: ignore[call-overload]
    pair = (f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
    inner, hidden = known[pair[0]]
    local = make((2 * inner // grid.tp.size, hidden))
    out.append(fused_gate_up(local, f"{prefix}fc1", pair, (inner, hidden), grid.tp))
    name = f"{prefix}mlp.down_proj.weight"
    out.append(_columns(name, known[name], grid, make))
    return out


def _columns(name: str, shape: tuple[int, ...], grid: ParallelGrid, make: Make) -> MegatronEntry:
    """A row-parallel linear: tensor parallelism cuts its columns."""
    return split(make((shape[0], shape[1] // grid.tp.size)), name, shape, 1, grid.tp)


def _experts(
    count: int, grid: ParallelGrid, known: dict[str, tuple[int, ...]], prefix: str, make: Make
) -> list[MegatronEntry]:
    """The experts of this rank, each tensor of its own."""
    inner, hidden = known[f"{prefix}0.gate_proj.weight"]
    mine, width = range(count // grid.ep.size), inner // grid.etp.size
    return [
        *expert_gate_up(
            [make((2 * width, hidden)) for _ in mine],
            f"{prefix}fc1.",
            lambda e: (f"{prefix}{e}.gate_proj.weight", f"{prefix}{e}.up_proj.weight"),
            (inner, hidden),
            count,
            grid,
        ),
        *expert_split(
            [make((hidden, width)) for _ in mine],
            f"{prefix}fc2.",
            lambda e: f"{prefix}{e}.down_proj.weight",
            (hidden, inner),
            1,
            count,
            grid,
        ),
    ]
