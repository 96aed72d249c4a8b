"""Trainer ranks of a Megatron-style TP x PP grid, as processes: fused, padded, interleaved."""

from __future__ import annotations

import torch

from bench.models import Config, random_weights
from tests.harness.processes import Child
from weight_sync.messages import TrainerEndpointInfo
from weight_sync.sources.megatron import MegatronEntry, MegatronSource
from weight_sync.sources.megatron_grid import ParallelGrid
from weight_sync.sources.megatron_layers import (
    fused_gate_up,
    fused_qkv,
    replicated,
    split,
    vocabulary,
)

Weights = dict[str, torch.Tensor]
_PADDED = 128


def _shard(tensor: torch.Tensor, grid: ParallelGrid, dim: int = 0) -> torch.Tensor:
    return tensor.chunk(grid.tp.size, dim)[grid.tp.rank].clone()


def _vocabulary(tensor: torch.Tensor, grid: ParallelGrid) -> torch.Tensor:
    padding = torch.full((_PADDED - tensor.shape[0], *tensor.shape[1:]), -1.0).to(tensor.dtype)
    return _shard(torch.cat([tensor, padding]), grid)


def _qkv(parts: list[torch.Tensor], groups: int, grid: ParallelGrid) -> torch.Tensor:
    """Per query group its queries, then its key, then its value."""
    cut = zip(*(p.chunk(groups) for p in parts), strict=True)
    return _shard(torch.cat([part for group in cut for part in group]), grid)


def _gate_up(gate: torch.Tensor, up: torch.Tensor, grid: ParallelGrid) -> torch.Tensor:
    return torch.cat([_shard(gate, grid), _shard(up, grid)])


def entries(cfg: Config, grid: ParallelGrid, full: Weights) -> list[MegatronEntry]:
    """What a rank of the grid holds of a dense Qwen2 configuration."""
    hidden, heads = int(cfg["hidden_size"]), int(cfg["num_attention_heads"])  # type: ignore[call-overload]
    kv = int(cfg["num_key_value_heads"])  # type: ignore[call-overload]
    inner, dim = int(cfg["intermediate_size"]), hidden // heads  # type: ignore[call-overload]
    vocab = (int(cfg["vocab_size"]), hidden)  # type: ignore[call-overload]
    out: list[MegatronEntry] = []

    def ends(name: str) -> None:
        out.append(vocabulary(_vocabulary(full[name], grid), name, vocab, _PADDED, grid.tp))

    if grid.pp.rank == 0:
        ends("model.embed_tokens.weight")
    for layer in grid.layers(int(cfg["num_hidden_layers"])):  # type: ignore[call-overload]
        p = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"{p}{norm}.weight"
            out.append(replicated(full[name].clone(), name, (hidden,)))
        for kind, rest in (("weight", (hidden,)), ("bias", ())):
            names = tuple(f"{p}self_attn.{n}_proj.{kind}" for n in "qkv")
            fused = _qkv([full[n] for n in names], kv, grid)
            out.append(
                fused_qkv(fused, f"{p}qkv.{kind}", names, heads, kv, dim, rest, grid.tp)  # type: ignore[arg-type]
            )
        for name, width in (("self_attn.o_proj", heads * dim), ("mlp.down_proj", inner)):
            key = f"{p}{name}.weight"
            out.append(split(_shard(full[key], grid, 1), key, (hidden, width), 1, grid.tp))
        pair = (f"{p}mlp.gate_proj.weight", f"{p}mlp.up_proj.weight")
        both = _gate_up(full[pair[0]], full[pair[1]], grid)
        out.append(fused_gate_up(both, f"{p}fc1", pair, (inner, hidden), grid.tp))
    if grid.pp.rank == grid.pp.size - 1:
        name = "model.norm.weight"
        out.append(replicated(full[name].clone(), name, (hidden,)))
        ends("lm_head.weight")
    return out


class MegatronRank:
    """One rank, inside its process."""

    def __init__(self, cfg: Config, rank: int, tp: int, pp: int) -> None:
        from weight_sync.trainer.endpoint import TrainerEndpoint

        self._cfg = cfg
        self._grid = ParallelGrid.of_rank(rank, tp=tp, pp=pp)
        self._held = entries(cfg, self._grid, random_weights(cfg, 1000))
        self.endpoint = TrainerEndpoint(MegatronSource(self._grid, self._held), rank)

    def info(self) -> TrainerEndpointInfo:
        return self.endpoint.info

    def publish(self, version: int, weights: int) -> None:
        """Writes the weights of ``weights`` in place and publishes them as ``version``."""
        fresh = entries(self._cfg, self._grid, random_weights(self._cfg, 1000 + weights))
        for mine, new in zip(self._held, fresh, strict=True):
            mine.tensor.copy_(new.tensor)
        self.endpoint.publish(version)


class MegatronTrainers:
    """All ranks of a grid; a context manager that always ends them."""

    def __init__(self, cfg: Config, tp: int, pp: int) -> None:
        self.ranks = [Child(MegatronRank, cfg, rank, tp, pp) for rank in range(tp * pp)]
        self.infos: list[TrainerEndpointInfo] = self.ask("info")  # type: ignore[assignment]

    def ask(self, method: str, *args: object, seconds: float = 60) -> list[object]:
        """Runs a method on all ranks and returns their answers."""
        for rank in self.ranks:
            rank.send(method, *args)
        return [rank.receive(seconds) for rank in self.ranks]

    def publish(self, version: int, weights: int) -> None:
        """All ranks publish."""
        self.ask("publish", version, weights)

    def __enter__(self) -> MegatronTrainers:
        return self

    def __exit__(self, *exc: object) -> None:
        for rank in self.ranks:
            rank.close()
