"""What the tests of rollouts share: a sampler that says what it is told to, and runners of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from tinker import types as tinker_types

from algorithms.data.rendering import stop_tokens
from algorithms.data.shapes import Row
from algorithms.rollouts.chat import ChatClient, Voice
from algorithms.rollouts.environment import (
    Environment,
    EnvironmentConfig,
    EnvironmentSection,
    Scorer,
)
from algorithms.rollouts.runner import Limits, RolloutRunner
from algorithms.rollouts.scenes import EnvironmentStage, Stage
from tests.algorithms.samples import byte_tokenizer

Answer = str | Exception
Say = Callable[[str, int], Answer]
"""What is said to a prompt, as text with its end of turn, by the sample's number in its request."""


class Scripted:
    """A sampling client that says what `say` says; every token has a logprob of its own."""

    def __init__(self, tokenizer: Any, say: Say, logprob: float | None = -0.5) -> None:
        self.tokenizer = tokenizer
        self.say = say
        self.logprob = logprob
        self.requests: list[tuple[str, int, tinker_types.SamplingParams]] = []

    async def sample(
        self,
        prompt: tinker_types.ModelInput,
        num_samples: int,
        sampling_params: tinker_types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> tinker_types.SampleResponse:
        text = self.tokenizer.decode(prompt.to_ints())
        self.requests.append((text, num_samples, sampling_params))
        sequences = [self._sequence(text, index, sampling_params) for index in range(num_samples)]
        scores = None
        if include_prompt_logprobs:
            scores = np.asarray([math.nan, *(-0.25 for _ in prompt.to_ints()[1:])], np.float32)
        return tinker_types.SampleResponse(sequences=sequences, prompt_logprobs_np=scores)

    def _sequence(
        self, prompt: str, index: int, params: tinker_types.SamplingParams
    ) -> tinker_types.SampledSequence:
        said = self.say(prompt, index)
        if isinstance(said, Exception):
            raise said
        tokens = self.tokenizer([said], add_special_tokens=False)["input_ids"][0]
        most = params.max_tokens or 0
        logprobs = None
        if self.logprob is not None:
            logprobs = np.full(len(tokens[:most]), self.logprob, np.float32)
        return tinker_types.SampledSequence(
            stop_reason="length" if len(tokens) > most else "stop",
            sequence_id=str(index),
            tokens_np=np.asarray(tokens[:most], np.int32),
            logprobs_np=logprobs,
        )


def voice(tokenizer: Any, max_tokens: int = 64, max_context: int | None = None) -> Voice:
    return Voice(tokenizer, stop_tokens(tokenizer), max_tokens, 1.0, max_context)


def chat(client: Scripted, max_turns: int = 4, max_tokens: int = 64) -> ChatClient:
    spoken = voice(client.tokenizer, max_tokens)
    return ChatClient(client, spoken, "rows:1", max_turns, lambda turn: turn + 1)


async def count_letters(row: Row, answer: str) -> float:
    return float(len(answer))


def runner(
    stage: Stage | type[Environment],
    tokenizer: Any = None,
    score: Callable[[Row, str], Scorer] | None = None,
    max_tokens: int = 64,
    max_context: int | None = None,
    **limits: Any,
) -> RolloutRunner:
    """One whose scores are lengths, if not told otherwise."""
    if isinstance(stage, type):
        stage = EnvironmentStage(section(stage))
    given = {
        "num_samples": 2,
        "n_concurrent": 64,
        "max_turns": 4,
        "max_retries": 0,
        "timeout_seconds": 5.0,
    }
    return RolloutRunner(
        stage,
        voice(tokenizer or byte_tokenizer(), max_tokens, max_context),
        Limits(**given | limits),  # type: ignore[arg-type]
        seed=7,
        score_row=score or (lambda row, place: partial(count_letters, row)),
    )


class _Section(EnvironmentSection):
    """A section of a class that is in no registry."""

    cls: Any

    def build(self, row: Row, seed: int, score: Scorer) -> Environment:
        built: Environment = self.cls(self.params, row, seed, score)
        return built


def section(environment: type[Environment], **params: Any) -> EnvironmentSection:
    config: EnvironmentConfig = environment.Config(**params)
    return _Section(kind=environment.__name__, params=config, cls=environment)


def placed(rows: Sequence[Row]) -> list[tuple[Row, str]]:
    return [(row, f"rows:{number}") for number, row in enumerate(rows, start=1)]
