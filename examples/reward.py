"""The demo's task: sums of two digits, with a reward that anyone can check."""

from __future__ import annotations

import re
from statistics import fmean, pstdev

# Two worked lines show the model the form; it then continues the third.
SHOTS = "2 + 3 = 5\n7 + 1 = 8\n"
PROBLEMS = ((7, 7), (9, 8), (7, 5), (4, 9), (8, 6), (6, 4), (5, 8), (3, 9))


def prompt(problem: tuple[int, int]) -> str:
    """The text whose next line the model has to complete."""
    return f"{SHOTS}{problem[0]} + {problem[1]} ="


def reward(problem: tuple[int, int], completion: str) -> float:
    """1 for the right sum and nothing else, 0.2 for any other bare number, else 0."""
    text = completion.strip()
    if not re.fullmatch(r"[0-9]+", text):
        return 0.0
    return 1.0 if int(text) == sum(problem) else 0.2


def advantages(rewards: list[float]) -> list[float]:
    """GRPO's group-relative advantages: (reward - mean) / standard deviation of one prompt's group.

    Formula: Shao et al. 2024, "DeepSeekMath", section 4.1. A group whose rewards are all equal says
    nothing about which completion is better and gets zeros.
    """
    mean, spread = fmean(rewards), pstdev(rewards)
    return [(r - mean) / spread if spread > 0 else 0.0 for r in rewards]
