"""What a step's rollouts look like in numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from algorithms.rewards.advantages import is_constant
from algorithms.rollouts.trajectory import Rollout

GOOD = 0.5
"""A group whose rewards are all alike is a good one from this reward on, else a bad one."""


def rollout_metrics(groups: Sequence[Sequence[Rollout]]) -> dict[str, float]:
    """Rewards, lengths and ends over all rollouts of the groups; shares lie in 0..1.

    `reward/groups_all_good`, `_all_bad` and `_mixed` are shares of the groups and add up to 1.
    `sampling/entropy` is the mean of -logp over sampled tokens, an estimate in nats.
    """
    rollouts = [rollout for group in groups for rollout in group]
    rewards = [rollout.reward for rollout in rollouts]
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    logprobs = [logprob for turn in turns for logprob in turn.logprobs]
    mean = _mean(rewards)
    alike = [group for group in groups if is_constant([rollout.reward for rollout in group])]
    good = sum(group[0].reward >= GOOD for group in alike)
    return {
        "reward/mean": mean,
        "reward/std": math.sqrt(_mean((reward - mean) ** 2 for reward in rewards)),
        "reward/n_trajectories": float(len(rollouts)),
        "reward/n_groups": float(len(groups)),
        "reward/groups_all_good": good / len(groups),
        "reward/groups_all_bad": (len(alike) - good) / len(groups),
        "reward/groups_mixed": (len(groups) - len(alike)) / len(groups),
        "rollout/tokens": _mean(
            float(sum(len(turn.tokens) for turn in rollout.turns)) for rollout in rollouts
        ),
        "rollout/turns": _mean(float(len(rollout.turns)) for rollout in rollouts),
        "rollout/truncated": _mean(
            float(any(turn.cut for turn in rollout.turns)) for rollout in rollouts
        ),
        "rollout/retries": float(sum(rollout.retries for rollout in rollouts)),
        "sampling/entropy": -_mean(logprobs),
        **_environment_metrics(rollouts),
    }


def _environment_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over the rollouts that have a metric."""
    names = sorted({name for rollout in rollouts for name in rollout.metrics})
    return {
        f"env/{name}": _mean(
            float(rollout.metrics[name]) for rollout in rollouts if name in rollout.metrics
        )
        for name in names
    }


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return math.fsum(listed) / len(listed)
