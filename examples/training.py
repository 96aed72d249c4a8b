"""The demo's loop: generate, step, refit, generate with the new weights, compare both sides."""

from __future__ import annotations

import time
from statistics import fmean

import reward
from commands import Sample
from records import StepRecord
from rollouts import Engine
from trainers import Trainers
from weight_sync.report import STAGES, RefitReport
from weight_sync.synchronizer import WeightSynchronizer

GROUP = 4


class Loop:
    """GRPO on ``reward.PROBLEMS`` with a refit after every optimizer step.

    Args:
        engine: Generates with the weights that the last refit brought.
        trainers: Hold the weights and change them.
        synchronizer: Brings the trainers' weights into the engine.
    """

    def __init__(
        self, engine: Engine, trainers: Trainers, synchronizer: WeightSynchronizer
    ) -> None:
        self._engine = engine
        self._trainers = trainers
        self._synchronizer = synchronizer

    def refit(self, version: int) -> RefitReport:
        """Brings the weights of this version from the trainers into the engine."""
        self._trainers.publish(version)
        return self._synchronizer.sync_weights(version=version)

    def run(self, steps: int) -> list[StepRecord]:
        """Trains for ``steps`` optimizer steps; prints and returns one record for each."""
        samples, mean_reward = self._generate()
        gap = self._gap(samples)
        print(f"version 0  reward {mean_reward:.3f}  from disk  logprob gap {gap:.4f}", flush=True)
        records = []
        for version in range(1, steps + 1):
            self._trainers.step(samples)
            began = time.perf_counter()
            report = self.refit(version)
            refit_ms = (time.perf_counter() - began) * 1e3
            samples, mean_reward = self._generate()
            record = StepRecord(
                version=report.version,
                reward=mean_reward,
                refit_ms=refit_ms,
                stages={n: report.seconds[n] * 1e3 for n in STAGES if n in report.seconds},
                bytes=report.bytes,
                verified=report.verified,
                logprob_gap=self._gap(samples),
            )
            print(record.line(), flush=True)
            records.append(record)
        return records

    def _generate(self) -> tuple[list[Sample], float]:
        """Samples a group for every problem; returns training samples and the mean reward."""
        groups = self._engine.sample([reward.prompt(p) for p in reward.PROBLEMS], GROUP)
        samples, rewards = [], []
        for problem, group in zip(reward.PROBLEMS, groups, strict=True):
            earned = [reward.reward(problem, rollout.text) for rollout in group]
            rewards += earned
            samples += [
                Sample(r.prompt_ids, r.token_ids, r.logprobs, advantage)
                for r, advantage in zip(group, reward.advantages(earned), strict=True)
            ]
        return samples, fmean(rewards)

    def _gap(self, samples: list[Sample]) -> float:
        """Mean |trainer - engine| log-probability of the sampled tokens, trainer as it is now."""
        scored = self._trainers.score(samples)
        return fmean(
            abs(trainer - engine)
            for logprobs, sample in zip(scored, samples, strict=True)
            for trainer, engine in zip(logprobs, sample.logprobs, strict=True)
        )
