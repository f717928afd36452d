"""From rewards to training examples: the advantage of every token that was sampled.

Shapes: a segment has N + 1 tokens; T are the sampled tokens of all examples, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from algorithms.base import Transcript
from algorithms.rewards.advantages import (
    AdvantageKind,
    group_advantages,
    is_constant,
    kl_penalties,
)
from algorithms.rollouts.likelihood import token_logprobs
from algorithms.rollouts.trajectory import Rollout, Segment, segments
from backends.base import SamplingClient


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """A segment, and the advantage of each of its tokens [N + 1]: 0 where it is not sampled."""

    segment: Segment
    advantages: npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Scored:
    """A rollout with its advantage, None if it is not trained on."""

    rollout: Rollout
    advantage: float | None

    def examples(self) -> list[Example]:
        """One for each segment; the advantage is that of all its sampled tokens."""
        if self.advantage is None:
            return []
        return [
            Example(segment, np.where(segment.mask, self.advantage, 0.0))
            for segment in segments(self.rollout.turns)
        ]

    def transcript(self) -> Transcript:
        """The rollout as a person reads it."""
        done = self.rollout
        return Transcript(done.group, done.messages, done.reward, self.advantage, done.end)


def scored(group: Sequence[Rollout], kind: AdvantageKind, drop_constant: bool) -> list[Scored]:
    """A group's rollouts compared with each other; none counts if it is dropped as constant."""
    rewards = [rollout.reward for rollout in group]
    if drop_constant and is_constant(rewards):
        return [Scored(rollout, None) for rollout in group]
    advantages = group_advantages(rewards, kind)
    return [Scored(*pair) for pair in zip(group, advantages, strict=True)]


async def kl_penalised(
    examples: Sequence[Example], base: SamplingClient, coef: float
) -> tuple[list[Example], float]:
    """The examples with `kl_penalties` added, and the mean of logp - logp_base over the tokens."""
    base_logprobs = await token_logprobs(base, [one.segment.tokens for one in examples])
    masks = [one.segment.mask for one in examples]
    sampled_T = np.concatenate([one.segment.logprobs[one.segment.mask] for one in examples])
    base_T = np.concatenate([p[mask] for p, mask in zip(base_logprobs, masks, strict=True)])
    penalties = np.split(
        kl_penalties(sampled_T, base_T, coef), np.cumsum([mask.sum() for mask in masks])[:-1]
    )
    penalised = []
    for one, penalty in zip(examples, penalties, strict=True):
        advantages = one.advantages.copy()
        advantages[one.segment.mask] += penalty
        penalised.append(replace(one, advantages=advantages))
    return penalised, float((sampled_T - base_T).mean())


async def anchored(examples: Sequence[Example], client: SamplingClient) -> list[Example]:
    """The examples with the sampler's logprobs of the tokens that were not sampled, too.

    The dro loss has a term beta / 2 * (p - q)^2 that no advantage of 0 turns off: with q = 0 it
    would teach the model its own prompts. With the sampler's q it is 0, with no gradient, for as
    long as the weights are those that were sampled from.
    """
    logprobs = await token_logprobs(client, [one.segment.tokens for one in examples])
    return [
        replace(
            one,
            segment=replace(
                one.segment, logprobs=np.where(one.segment.mask, one.segment.logprobs, logprobs_n)
            ),
        )
        for one, logprobs_n in zip(examples, logprobs, strict=True)
    ]
