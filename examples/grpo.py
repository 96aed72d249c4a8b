"""GRPO in plain torch: padding, log-probabilities of sampled tokens, and the clipped loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from commands import Sample


@dataclass(frozen=True)
class Batch:
    """Samples as tensors; prompts are padded on the left, completions on the right.

    Attributes:
        ids: int64 ``[n, prompt + completion]``.
        attended: int64, same shape, 1 where ``ids`` holds a real token.
        positions: int64, same shape, position of each real token in its own sequence.
        mask: bool ``[n, completion]``, true where a token was sampled.
        engine_logprobs: fp32 ``[n, completion]``, the engine's, 0 where nothing was sampled.
        advantages: fp32 ``[n, 1]``.
    """

    ids: torch.Tensor
    attended: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    engine_logprobs: torch.Tensor
    advantages: torch.Tensor


def batch(samples: list[Sample], pad_id: int, device: torch.device) -> Batch:
    """Pads samples so that every completion starts in the same column.

    Args:
        samples: At least one.
        pad_id: Fills what is left.
        device: Where the tensors go.
    """
    n = len(samples)
    before = max(len(s.prompt) for s in samples)
    after = max(len(s.completion) for s in samples)
    ids = torch.full((n, before + after), pad_id)
    attended = torch.zeros((n, before + after), dtype=torch.int64)
    logprobs = torch.zeros((n, after))
    for row, s in enumerate(samples):
        start, end = before - len(s.prompt), before + len(s.completion)
        ids[row, start:end] = torch.tensor(s.prompt + s.completion)
        attended[row, start:end] = 1
        logprobs[row, : len(s.completion)] = torch.tensor(s.logprobs)
    return Batch(
        ids=ids.to(device),
        attended=attended.to(device),
        positions=(attended.cumsum(dim=1) - 1).clamp(min=0).to(device),
        mask=attended[:, before:].bool().to(device),
        engine_logprobs=logprobs.to(device),
        advantages=torch.tensor([[s.advantage] for s in samples], device=device),
    )


def token_logprobs(model: torch.nn.Module, data: Batch) -> torch.Tensor:
    """Log-probabilities of the sampled tokens under ``model``: fp32 ``[n, completion]``."""
    width = data.mask.shape[1]
    # One more logit than tokens: the last prompt token predicts the first sampled one.
    logits = model(
        input_ids=data.ids,
        attention_mask=data.attended,
        position_ids=data.positions,
        logits_to_keep=width + 1,
        use_cache=False,
    ).logits
    chosen = data.ids[:, -width:].unsqueeze(-1)
    logprobs = logits[:, :-1].float().log_softmax(dim=-1).gather(-1, chosen).squeeze(-1)
    return logprobs * data.mask


def policy_loss(
    logprobs: torch.Tensor, data: Batch, *, tokens: int, clip: float = 0.2
) -> torch.Tensor:
    """Clipped policy-gradient loss (Schulman et al. 2017, eq. 7) over the batch's sampled tokens.

    The engine's log-probabilities are the old policy, since they are what the tokens were drawn
    from; a stale engine would show here as ratios far from 1. No KL term.

    Args:
        logprobs: fp32 ``[n, completion]`` from ``token_logprobs``.
        data: The batch they belong to.
        tokens: What the sum is divided by: sampled tokens of the whole batch.
        clip: How far the ratio may move before its gradient is cut.
    """
    ratio = (logprobs - data.engine_logprobs).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    gain = torch.minimum(ratio * data.advantages, clipped * data.advantages)
    return -(gain * data.mask).sum() / tokens
