"""Advantages: how much better a rollout did than the others of its group.

Shapes: S samples of one prompt (a group), T sampled tokens of a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

AdvantageKind = Literal["mean", "mean_std", "leave_one_out"]

STD_EPS = 1e-6
"""Added to a group's standard deviation before `mean_std` divides by it."""


def group_advantages(rewards_S: Sequence[float], kind: AdvantageKind) -> list[float]:
    """The advantage of each sample of a group, [S]; all 0 where the rewards are alike.

    mean:           A_i = r_i - mean(r)                             (Dr. GRPO, arXiv 2503.20783)
    mean_std:       A_i = (r_i - mean(r)) / (std(r) + STD_EPS)      (GRPO, arXiv 2402.03300)
    leave_one_out:  A_i = r_i - mean of the other rewards           (RLOO, arXiv 2402.14740)

    std is that of the population (divided by S). Raises ValueError for a group of one, of which
    every advantage would be 0.
    """
    n = len(rewards_S)
    if n < 2:
        raise ValueError("a group of one sample has no advantages")
    if is_constant(rewards_S):
        return [0.0] * n  # exactly, whatever the rounding of a mean
    mean = math.fsum(rewards_S) / n
    centred = [reward - mean for reward in rewards_S]
    if kind == "mean":
        return centred
    if kind == "leave_one_out":  # r_i - (n * mean - r_i) / (n - 1)
        return [advantage * n / (n - 1) for advantage in centred]
    std = math.sqrt(math.fsum(advantage**2 for advantage in centred) / n)
    return [advantage / (std + STD_EPS) for advantage in centred]


def is_constant(rewards_S: Sequence[float]) -> bool:
    """Whether a group's rewards are all alike, so that it says nothing of what is better."""
    return all(reward == rewards_S[0] for reward in rewards_S)


def kl_penalties(
    logprobs_T: npt.NDArray[np.float64], base_T: npt.NDArray[np.float64], coef: float
) -> npt.NDArray[np.float64]:
    """What a KL penalty against the base adds to the advantage of each sampled token, [T].

    With d_t = logp_sampled_t - logp_base_t over all sampled tokens of a step, whose mean estimates
    KL(policy || base), it is coef * (mean(d) - d_t): tokens that the policy likes more than the
    base does are held back. Centred, so that it sums to 0 and does not move all tokens one way.
    Source: tinker-cookbook, `incorporate_kl_penalty`.
    """
    difference_T = logprobs_T - base_T
    mean = math.fsum(difference_T.tolist()) / max(difference_T.size, 1)
    penalties: npt.NDArray[np.float64] = coef * (mean - difference_T)
    return penalties
