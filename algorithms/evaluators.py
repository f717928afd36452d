"""Held-out scores during a run: the model answers rows it was not trained on, a verifier scores it.

An evaluation is prepared once (prompts to tokens) and then run against any sampling client.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from algorithms.data.dataset import (
    Dataset,
    PlainText,
    Row,
    dataset_problems,
    expected_answer,
    last_assistant,
    load_dataset,
    read_example,
    row_problem,
    shorten,
)
from algorithms.data.rendering import chat_prompt, plain_prompt, stop_tokens
from algorithms.rewards.verifiers import Verifier
from backends.base import SamplingClient, Tokenizer
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from tinker import types as tinker_types

    from algorithms.experiment import EvaluationSpec

SAMPLES_IN_FLIGHT = 128
"""Prompts submitted and not yet answered; enough to fill any engine's batch."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One row as it was answered and scored."""

    prompt: str
    completion: str
    expected: str
    reward: float


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The mean reward after `step` steps done, what else was measured, and every sample."""

    name: str
    step: int
    score: float
    metrics: Mapping[str, float]
    samples: Sequence[Sample]


@dataclass(frozen=True, slots=True)
class Question:
    """A row to be answered: its prompt as tokens, and as a person reads it."""

    row: Row
    place: str
    tokens: list[int] = field(repr=False)
    prompt: str
    expected: str


@dataclass(frozen=True)
class PreparedEvaluation:
    """An evaluation that is ready to run."""

    spec: EvaluationSpec
    questions: list[Question]
    verifier: Verifier
    tokenizer: Tokenizer
    stop: list[int]

    def is_due(self, steps_done: int, total_steps: int) -> bool:
        """Whether to evaluate after so many steps: before the first, at the marks, at the end."""
        if steps_done == 0:
            return self.spec.before
        at_mark = self.spec.every is not None and steps_done % self.spec.every == 0
        return at_mark or steps_done == total_steps

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of what decides the score of given weights: settings, rows and their tokens."""
        settings = self.spec.model_dump(mode="json", exclude={"every", "before"})
        rows = [(question.tokens, question.row) for question in self.questions]
        return hashlib.sha256(json.dumps([settings, rows], sort_keys=True).encode()).hexdigest()


def prepare(spec: EvaluationSpec, tokenizer: Tokenizer) -> PreparedEvaluation:
    """Read the rows and render their prompts. Raises UserError naming each bad row."""
    dataset = load_dataset(spec.data, f"evaluations.{spec.name}.data").head(spec.limit)
    problems = evaluation_problems(spec, dataset)
    questions: list[Question] = []
    if not problems:
        for row, place in zip(dataset.rows, dataset.places, strict=True):
            try:
                questions.append(_question(spec, row, place, tokenizer))
            except UserError as error:
                problems.extend(error.problems)
    if problems:
        raise UserError(*shorten(problems))
    verifier, stop = spec.verifier.build(), stop_tokens(tokenizer)
    prepared = PreparedEvaluation(spec, questions, verifier, tokenizer, stop)
    _ = prepared.fingerprint  # made here, where nothing waits for it
    return prepared


def evaluation_problems(spec: EvaluationSpec, dataset: Dataset) -> list[Problem]:
    """What is wrong with held-out rows: each needs a prompt and the right answer."""

    def check(row: Row, place: str) -> Problem | None:
        problem = row_problem(row, place)
        if problem is None and spec.system_prompt and isinstance(read_example(row), PlainText):
            return Problem(
                place,
                f"a plain prompt, which cannot take the system_prompt of {spec.name!r}",
                "give the row as messages, or leave system_prompt out",
            )
        return problem

    return dataset_problems(dataset, check)


def _question(spec: EvaluationSpec, row: Row, place: str, tokenizer: Tokenizer) -> Question:
    example = read_example(row)
    expected = expected_answer(row)
    if isinstance(example, PlainText):
        tokens = plain_prompt(example.prompt, tokenizer)
        return Question(row, place, tokens, example.prompt, expected)
    messages = example.messages[: last_assistant(example.messages)]
    if spec.system_prompt and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": spec.system_prompt}, *messages]
    tokens = chat_prompt(messages, tokenizer, example.tools, place)
    return Question(row, place, tokens, str(messages[-1].get("content") or ""), expected)


async def evaluate(
    prepared: PreparedEvaluation, client: SamplingClient, step: int
) -> EvaluationResult:
    """Answer and score every row. Raises what the client raises, and UserError if scoring fails."""
    places = asyncio.Semaphore(SAMPLES_IN_FLIGHT)
    params = _sampling_params(prepared)

    async def one(question: Question) -> tuple[Sample, bool]:
        async with places:
            answer = await client.sample(_model_input(question), 1, params)
        return await _score(prepared, question, answer)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(question)) for question in prepared.questions]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    samples = [task.result()[0] for task in tasks]
    mean = math.fsum(sample.reward for sample in samples) / len(samples)
    cut = sum(task.result()[1] for task in tasks) / len(samples)
    metrics = {"reward/mean": mean, "n": float(len(samples)), "answers_cut": cut}
    return EvaluationResult(prepared.spec.name, step, mean, metrics, samples)


def _sampling_params(prepared: PreparedEvaluation) -> tinker_types.SamplingParams:
    from tinker import types as tinker_types

    return tinker_types.SamplingParams(
        max_tokens=prepared.spec.max_tokens,
        temperature=prepared.spec.temperature,
        stop=prepared.stop,
    )


def _model_input(question: Question) -> tinker_types.ModelInput:
    from tinker import types as tinker_types

    return tinker_types.ModelInput.from_ints(question.tokens)


async def _score(
    prepared: PreparedEvaluation, question: Question, answer: tinker_types.SampleResponse
) -> tuple[Sample, bool]:
    """The scored sample, and whether the answer was cut off at max_tokens."""
    tokens = list(answer.sequences[0].tokens)
    while tokens and tokens[-1] in prepared.stop:
        tokens.pop()
    completion = str(prepared.tokenizer.decode(tokens, skip_special_tokens=True))
    reward = await _reward(prepared, question, completion)
    sample = Sample(question.prompt, completion, question.expected, reward)
    return sample, answer.sequences[0].stop_reason == "length"


async def _reward(prepared: PreparedEvaluation, question: Question, completion: str) -> float:
    where = f"evaluations.{prepared.spec.name}.verifier"
    kind = prepared.spec.verifier.kind
    try:
        reward: Any = prepared.verifier(question.row, completion)
        if inspect.isawaitable(reward):
            reward = await reward
        number = float(reward)
    except Exception as error:
        what = f"{kind} raised {type(error).__name__}: {error} (row {question.place})"
        raise UserError(Problem(where, what, "mend the verifier or the row")) from error
    if not math.isfinite(number):
        what = f"{kind} gave {number} (row {question.place})"
        raise UserError(Problem(where, what, "a reward is a finite number"))
    return number
