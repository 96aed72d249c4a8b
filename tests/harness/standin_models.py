"""Fused dense and MoE stand-ins of a ``bench.models`` configuration, for one TP worker."""

from __future__ import annotations

import torch

from bench.models import Config
from tests.harness.standin import Loader, StandinModel, Tensors, Unit, copies, takes

_ROUND = 64  # Vocabularies are padded to a multiple of this, as vLLM does.


class Parts:
    """Collects units and loaders."""

    def __init__(self, rank: int, tp: int, dtype: torch.dtype) -> None:
        self.rank, self.tp, self.dtype = rank, tp, dtype
        self.units: list[Unit] = []
        self.loaders: dict[str, list[tuple[str, Loader]]] = {}

    def read(self, name: str, unit: str, loader: Loader) -> None:
        self.loaders.setdefault(name, []).append((unit, loader))

    def unit(self, name: str, **options: object) -> None:
        shapes = {k: (v, self.dtype) for k, v in options.pop("shapes").items()}  # type: ignore[attr-defined]
        self.units.append(Unit(name, shapes, **options))  # type: ignore[arg-type]

    def replicated(self, name: str, *shape: int) -> None:
        self.unit(name, shapes={"weight": shape})
        self.read(f"{name}.weight", name, copies("weight"))

    def rows(self, name: str, parts: dict[str, int], width: int, bias: bool) -> None:
        """A column-parallel linear fused of ``parts``: checkpoint module -> global rows."""
        local = {p: n // self.tp for p, n in parts.items()}
        total = sum(local.values())
        shapes = {"weight": (total, width)} | ({"bias": (total,)} if bias else {})
        self.unit(name, shapes=shapes)
        for attribute in shapes:
            at = 0
            for part, n in local.items():
                self.read(
                    f"{part}.{attribute}", name, takes(attribute, 0, self.rank, self.tp, at, n)
                )
                at += n

    def columns(self, name: str, out: int, width: int, **options: object) -> None:
        """A row-parallel linear."""
        self.unit(name, shapes={"weight": (out, width // self.tp)}, **options)
        self.read(f"{name}.weight", name, takes("weight", 1, self.rank, self.tp))

    def vocabulary(self, name: str, vocab: int, hidden: int) -> None:
        padded = -(-vocab // _ROUND) * _ROUND
        local = padded // self.tp
        first = self.rank * local
        real = max(0, min(vocab - first, local))

        def load(tensors: Tensors, loaded: torch.Tensor) -> None:
            tensors["weight"][:real].copy_(loaded[first : first + real])
            tensors["weight"][real:].fill_(0)

        self.unit(name, shapes={"weight": (local, hidden)})
        self.read(f"{name}.weight", name, load)

    def experts(self, name: str, experts: int, inner: int, hidden: int) -> None:
        mine = inner // self.tp
        shapes = {"w13": (experts, 2 * mine, hidden), "w2": (experts, hidden, mine)}
        self.unit(name, shapes=shapes, post_load=pack_experts)
        for e in range(experts):
            for part, attribute, dim, at in (
                ("gate", "w13", 0, 0),
                ("up", "w13", 0, mine),
                ("down", "w2", 1, 0),
            ):
                take = takes("_", dim, self.rank, self.tp, at, mine)
                self.read(f"{name}.{e}.{part}_proj.weight", name, _expert(e, attribute, take))


def _expert(number: int, attribute: str, take: Loader) -> Loader:
    def load(tensors: Tensors, loaded: torch.Tensor) -> None:
        take({"_": tensors[attribute][number]}, loaded)

    return load


def pack_experts(tensors: Tensors) -> Tensors:
    """Kernel layout: output rows and input columns swapped."""
    return {name: t.transpose(1, 2).contiguous() for name, t in tensors.items()}


def halves_swapped(tensors: Tensors) -> Tensors:
    """Kernel layout of a linear whose second half comes first."""
    weight = tensors["weight"]
    return {"weight": torch.cat([weight[weight.shape[0] // 2 :], weight[: weight.shape[0] // 2]])}


def fused(cfg: Config, rank: int = 0, tp: int = 1) -> StandinModel:
    """A stand-in of a Qwen2, Qwen3 or Qwen3-MoE configuration."""
    return assemble(cfg, Parts(rank, tp, torch.bfloat16))


def assemble(cfg: Config, parts: Parts) -> StandinModel:
    """A stand-in whose modules are made by ``parts``."""
    hidden, heads = int(cfg["hidden_size"]), int(cfg["num_attention_heads"])  # type: ignore[call-overload]
    kv = int(cfg["num_key_value_heads"])  # type: ignore[call-overload]
    dim = int(cfg.get("head_dim", hidden // heads))  # type: ignore[call-overload]
    biased = cfg["model_type"] == "qwen2"
    parts.vocabulary("model.embed_tokens", int(cfg["vocab_size"]), hidden)  # type: ignore[call-overload]
    for i in range(int(cfg["num_hidden_layers"])):  # type: ignore[call-overload]
        p = f"model.layers.{i}."
        parts.replicated(p + "input_layernorm", hidden)
        qkv = {f"{p}self_attn.{n}_proj": r * dim for n, r in (("q", heads), ("k", kv), ("v", kv))}
        parts.rows(p + "self_attn.qkv_proj", qkv, hidden, biased)
        parts.columns(p + "self_attn.o_proj", hidden, heads * dim)
        if not biased:
            parts.replicated(p + "self_attn.q_norm", dim)
            parts.replicated(p + "self_attn.k_norm", dim)
        parts.replicated(p + "post_attention_layernorm", hidden)
        if "num_experts" in cfg:
            experts = int(cfg["num_experts"])  # type: ignore[call-overload]
            parts.replicated(p + "mlp.gate", experts, hidden)
            parts.experts(p + "mlp.experts", experts, int(cfg["moe_intermediate_size"]), hidden)  # type: ignore[call-overload]
        else:
            inner = int(cfg["intermediate_size"])  # type: ignore[call-overload]
            both = {f"{p}mlp.gate_proj": inner, f"{p}mlp.up_proj": inner}
            parts.rows(p + "mlp.gate_up_proj", both, hidden, False)
            parts.columns(p + "mlp.down_proj", hidden, inner, post_load=halves_swapped)
    parts.replicated("model.norm", hidden)
    if not cfg["tie_word_embeddings"]:
        parts.vocabulary("lm_head", int(cfg["vocab_size"]), hidden)  # type: ignore[call-overload]
    return StandinModel(parts.units, parts.loaders)
