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

GROUP = 4
REFIT_DEADLINE_S = 120.0


class Loop:
    """GRPO on ``reward.PROBLEMS`` with a refit after every optimizer step.

    Args:
        engine: Generates with the weights that the last refit brought.
        trainers: Hold the weights and change them.
    """

    def __init__(self, engine: Engine, trainers: Trainers) -> None:
        self._engine = engine
        self._trainers = trainers

    def refit(self, version: int) -> RefitReport:
        """Brings the weights of this version from the trainers into the engine."""
        self._trainers.publish(version)
        (refit,) = self._engine.fleet.update_weights_via_ipc_zmq(version=version)
        return refit.result(REFIT_DEADLINE_S)

    def run(self, steps: int) -> list[StepRecord]:
        """Trains for ``steps`` optimizer steps; prints and returns one record for each."""
        samples, mean_reward, _ = self._generate()
        gap = self._gap(samples)
        print(f"version 0  reward {mean_reward:.3f}  from disk  logprob gap {gap:.4f}", flush=True)
        records = []
        for version in range(1, steps + 1):
            self._trainers.step(samples)
            began = time.perf_counter()
            report = self.refit(version)
            refit_ms = (time.perf_counter() - began) * 1e3
            samples, mean_reward, versions = self._generate()
            record = StepRecord(
                version=report.version,
                reward=mean_reward,
                refit_ms=refit_ms,
                stages={n: report.seconds[n] * 1e3 for n in STAGES if n in report.seconds},
                bytes=report.bytes,
                verified=report.verified,
                stamped=versions == {version},
                logprob_gap=self._gap(samples),
            )
            print(record.line(), flush=True)
            records.append(record)
        return records

    def _generate(self) -> tuple[list[Sample], float, set[int]]:
        """Samples a group for every problem.

        Returns:
            Training samples, the mean reward, and the weight versions of the sampled tokens.
        """
        groups = self._engine.sample([reward.prompt(p) for p in reward.PROBLEMS], GROUP)
        samples, rewards, versions = [], [], set()
        for problem, group in zip(reward.PROBLEMS, groups, strict=True):
            earned = [reward.reward(problem, rollout.text) for rollout in group]
            rewards += earned
            samples += [
                Sample(r.prompt_ids, r.token_ids, r.logprobs, advantage)
                for r, advantage in zip(group, reward.advantages(earned), strict=True)
            ]
            versions |= {version for rollout in group for version in rollout.versions}
        return samples, fmean(rewards), versions

    def _gap(self, samples: list[Sample]) -> float:
        """Mean |trainer - engine| log-probability of the sampled tokens, trainer as it is now."""
        scored = self._trainers.score(samples)
        return fmean(
            abs(trainer - engine)
            for logprobs, sample in zip(scored, samples, strict=True)
            for trainer, engine in zip(logprobs, sample.logprobs, strict=True)
        )
