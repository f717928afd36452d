"""A small on-policy algorithm: samples from the weights in training, and learns from its samples.

Importing this module makes `algorithm: {kind: sampling}` known to the process. Its batches depend
on the seed, the step and the weights alone, so that a replay must give the same ones; each row of
metrics holds a checksum of what was sampled.
"""

from __future__ import annotations

import asyncio
import zlib
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field

from algorithms.base import BaseAlgorithm, BaseAlgorithmConfig, RunContext, TrainingBatch
from algorithms.data.order import batch_rows, steps_per_epoch
from algorithms.data.rendering import plain_prompt
from algorithms.registry import register_algorithm
from backends.base import Backend

if TYPE_CHECKING:
    import tinker
    from tinker import types as tinker_types


class SamplingConfig(BaseAlgorithmConfig):
    """What it can be told."""

    group_size: int = Field(2, ge=1, description="Samples of each prompt.")
    max_tokens: int = Field(6, ge=1, description="Longest sample, in tokens.")
    staleness: int = Field(0, ge=0, description="Steps by which samples are older than fresh.")


@register_algorithm("sampling")
class Sampling(BaseAlgorithm):
    """Policy gradient on one's own samples; the reward is how many of the tokens are even."""

    name: ClassVar[str] = "sampling"
    Config: ClassVar[type[BaseAlgorithmConfig]] = SamplingConfig
    on_policy: ClassVar[bool] = True
    sampled: ClassVar[list[int]] = []
    """The steps that this process has sampled for, in order; for tests to look at."""

    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        """Tokens of every prompt."""
        self._policy, self._seed = ctx.policy, ctx.config.seed
        self._prompts = [plain_prompt(_question(row), ctx.tokenizer) for row in ctx.dataset.rows]
        self._steps_per_epoch = steps_per_epoch(len(self._prompts), self.cfg.batch_size)

    def sampled_after(self, step_idx: int) -> int:
        """Always as stale as it may be."""
        return max(0, step_idx - self.cfg.staleness)

    async def build_batch(self, step_idx: int) -> TrainingBatch:
        """Sample each of the step's prompts from the weights as they are now."""
        from tinker import types as tinker_types

        client = await self._policy.sampler(step_idx)
        picked = batch_rows(len(self._prompts), self.cfg.batch_size, self._seed, step_idx)

        async def sample(index: int) -> tinker_types.SampleResponse:
            params = tinker_types.SamplingParams(
                max_tokens=self.cfg.max_tokens,
                temperature=1.0,
                seed=1_000_003 * self._seed + 1_009 * step_idx + index,
            )
            prompt = tinker_types.ModelInput.from_ints(self._prompts[index])
            return await client.sample(prompt, self.cfg.group_size, params)

        answers = await asyncio.gather(*(sample(index) for index in picked))
        Sampling.sampled.append(step_idx)
        data: list[tinker.Datum] = []
        rewards: list[float] = []
        checksum = 0
        for index, answer in zip(picked, answers, strict=True):
            for sequence in answer.sequences:
                tokens = list(sequence.tokens)
                checksum = zlib.crc32(np.asarray(tokens, np.int64).tobytes(), checksum)
                reward = sum(token % 2 == 0 for token in tokens) / len(tokens)
                rewards.append(reward)
                logprobs = list(sequence.logprobs or [])
                data.append(_datum(self._prompts[index], tokens, logprobs, reward - 0.5))
        metrics = {
            "reward/mean": float(np.mean(rewards)),
            "samples/checksum": float(checksum),
        }
        return TrainingBatch(data, "importance_sampling", metrics=metrics)


def _question(row: dict[str, object]) -> str:
    """A prompt of a row, whatever its shape."""
    if "prompt" in row:
        return str(row["prompt"])
    messages = row["messages"]
    assert isinstance(messages, list)
    return str(messages[0]["content"])


def _datum(
    prompt: list[int], tokens: list[int], logprobs: list[float], advantage: float
) -> tinker.Datum:
    """One sample; prompt tokens have neither logprob nor advantage."""
    import tinker
    from tinker import types as tinker_types

    whole = [*prompt, *tokens]
    before = len(prompt) - 1
    return tinker.Datum(
        model_input=tinker_types.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(np.asarray(whole[1:], np.int64)),
            "logprobs": tinker.TensorData.from_numpy(
                np.asarray([0.0] * before + logprobs, np.float32)
            ),
            "advantages": tinker.TensorData.from_numpy(
                np.asarray([0.0] * before + [advantage] * len(tokens), np.float32)
            ),
        },
    )
