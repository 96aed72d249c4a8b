"""Which experts a Qwen3-MoE's routers choose, by transformers in float32 on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

# Logits of an engine in bf16 differ by hundredths; experts that are nearer to each other than this
# may change places, and with them everything behind in that token.
NEAR = 0.1


@dataclass(frozen=True)
class Judgement:
    """How routes compare with what the routers choose.

    Attributes:
        decided: Routes of one token in one layer whose choice is not a near tie, in that layer and
            all layers before.
        wrong: Those of them that name other experts.
    """

    decided: int
    wrong: int


class RouterOracle:
    """The model of a checkpoint, that says how it would route a sequence.

    Args:
        folder: A Qwen3-MoE checkpoint in Hugging Face format.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
        self._logits: list[torch.Tensor] = []
        for name, module in self._model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(self._note)

    def _note(self, gate: torch.nn.Module, inputs: tuple[torch.Tensor, ...], _: object) -> None:
        hidden, weight = inputs[0], gate.get_parameter("weight")
        self._logits.append(hidden.reshape(-1, hidden.shape[-1]) @ weight.T)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Router logits ``[tokens, layers, experts]`` of a sequence."""
        self._logits.clear()
        with torch.no_grad():
            self._model(input_ids=torch.tensor([tokens]))
        return torch.stack(self._logits, dim=1)

    def judge(self, tokens: list[int], routes: torch.Tensor, start: int = 0) -> Judgement:
        """Compares routes with what the routers choose, whatever the order within a choice.

        Args:
            tokens: The sequence.
            routes: Expert ids ``[rows, layers, topk]`` of its first tokens.
            start: First row to compare.
        """
        logits = self.logits(tokens)[start : len(routes)]
        topk = routes.shape[2]
        best = logits.topk(topk + 1, dim=-1)
        gap = best.values[..., topk - 1] - best.values[..., topk]
        decided = (gap > NEAR).int().cumprod(dim=1).bool()
        chosen = best.indices[..., :topk].sort(dim=-1).values
        wrong = (chosen != routes[start:].long().sort(dim=-1).values).any(dim=-1)
        return Judgement(int(decided.sum()), int((decided & wrong).sum()))
