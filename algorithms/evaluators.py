"""Held-out scores during a run, on rows it was not trained on.

A benchmark lets the model answer, and a verifier says what each answer is worth; a held-out NLL
says how likely the rows' own answers are to the model, and a preference which of a row's two
answers is likelier to it. An evaluation is prepared once (rows to tokens) and then run against any
sampling client.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from algorithms.data.dataset import Dataset, dataset_problems, load_dataset, shorten
from algorithms.data.pairs import render_pairs
from algorithms.data.rendering import (
    Rendered,
    chat_prompt,
    longest_scored,
    plain_prompt,
    render_rows,
    stop_tokens,
)
from algorithms.data.shapes import (
    PlainText,
    Row,
    expected_answer,
    last_assistant,
    preference_problem,
    read_example,
    read_preference,
    row_problem,
    scored_problem,
)
from algorithms.rewards.metrics import likelihood_metrics, reward_metrics
from algorithms.rewards.scoring import bind, check_row, code_behind, score
from algorithms.rewards.section import VerifierSection
from algorithms.rewards.verifiers import Verifier
from algorithms.rollouts.environment import ENVIRONMENTS
from backends.base import Backend, SamplingClient, Tokenizer
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from tinker import types as tinker_types

    from algorithms.experiment import EvaluationSpec

T = TypeVar("T")

REQUESTS_IN_FLIGHT = 128
"""Prompts submitted and not yet answered; enough to fill any engine's batch."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer as it was given and scored."""

    prompt: str
    completion: str
    expected: str
    reward: float


@dataclass(frozen=True, slots=True)
class ScoredRow:
    """A row's own answer as the model sees it: `nll` in nats per token, over `tokens` of them."""

    prompt: str
    expected: str
    nll: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ScoredPair:
    """A row's two answers, and by how many nats the chosen one is likelier to the model."""

    prompt: str
    chosen: str
    rejected: str
    margin: float


AnySample = Sample | ScoredRow | ScoredPair


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The score after `step` steps done, all that was measured, and every answer or row.

    Answers to the same row stand next to each other.
    """

    name: str
    step: int
    score: float
    metrics: Mapping[str, float]
    samples: Sequence[AnySample]


def read_sample(fields: Mapping[str, Any]) -> AnySample:
    """The sample whose fields, as JSON holds them, these are."""
    if "margin" in fields:
        return ScoredPair(**fields)
    return Sample(**fields) if "reward" in fields else ScoredRow(**fields)


def read_result(fields: Mapping[str, Any]) -> EvaluationResult:
    """The same of a result."""
    return EvaluationResult(**{**fields, "samples": list(map(read_sample, fields["samples"]))})


@dataclass(frozen=True)
class PreparedEvaluation(ABC):
    """An evaluation that is ready to run."""

    spec: EvaluationSpec
    tokenizer: Tokenizer

    async def bind(self, backend: Backend) -> None:
        """Open what scoring needs of a run's backend; once for each backend, before `measure`."""
        return None

    def code(self) -> list[object]:
        """Everything whose source decides the score of given answers."""
        return []

    def is_due(self, steps_done: int, total_steps: int) -> bool:
        """Whether to evaluate after so many steps: before the first, at the marks, at the end."""
        if steps_done == 0:
            return self.spec.before
        at_mark = self.spec.every is not None and steps_done % self.spec.every == 0
        return at_mark or steps_done == total_steps

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of what decides the score of given weights: settings, rows and their tokens."""
        settings = self.spec.model_dump(mode="json", exclude={"every", "before", "role"})
        content = json.dumps([settings, self.content()], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @abstractmethod
    def content(self) -> Any:
        """What decides the score beside the settings, as JSON."""

    @abstractmethod
    async def measure(self, client: SamplingClient) -> tuple[dict[str, float], Sequence[AnySample]]:
        """The metrics of a client's weights, and what they come from."""


def prepare(spec: EvaluationSpec, tokenizer: Tokenizer, seed: int = 0) -> PreparedEvaluation:
    """Read the rows and render them. Raises UserError naming each bad row.

    `seed` is the experiment's; answers that are drawn depend on it, and not on the step.
    """
    dataset = load_dataset(spec.data, f"evaluations.{spec.name}.data").head(spec.limit)
    verifier = None if spec.verifier is None else spec.verifier.build()
    if problems := evaluation_problems(spec, dataset, verifier):
        raise UserError(*shorten(problems))
    prepared: PreparedEvaluation
    if spec.kind == "preference":
        prepared = HeldOutPreference.of(spec, dataset, tokenizer)
    elif spec.verifier is None or verifier is None:
        prepared = HeldOutNLL.of(spec, dataset, tokenizer)
    elif spec.environment is not None:
        from algorithms.rollouts.played import Played  # here, as that module builds on this one

        scored_by = (spec.verifier, verifier)
        prepared = Played.of(spec, spec.environment, dataset, tokenizer, scored_by, seed)
    else:
        prepared = Benchmark.of(spec, dataset, tokenizer, (spec.verifier, verifier), seed)
    _ = prepared.fingerprint  # made here, where nothing waits for it
    return prepared


def evaluation_problems(
    spec: EvaluationSpec, dataset: Dataset, verifier: Verifier | None
) -> list[Problem]:
    """What is wrong with held-out rows: each needs a prompt, an answer, and what scores it.

    In an environment it is for that to say what they need; a preference needs two answers.
    """
    if spec.kind == "preference":
        return dataset_problems(dataset, preference_problem)
    if spec.environment is not None:
        environment = ENVIRONMENTS[spec.environment.kind]

        def playable(row: Row, place: str) -> Problem | None:
            problem = environment.check_row(row, place)
            if problem is None and verifier is not None and not environment.own_reward:
                return check_row(verifier, row, place)
            return problem

        return dataset_problems(dataset, playable)

    def check(row: Row, place: str) -> Problem | None:
        problem = (row_problem if verifier else scored_problem)(row, place)
        if problem is None and spec.system_prompt and isinstance(read_example(row), PlainText):
            return Problem(
                place,
                f"a plain prompt, which cannot take the system_prompt of {spec.name!r}",
                "give the row as messages, or leave system_prompt out",
            )
        if problem is None and verifier is not None:
            return check_row(verifier, row, place)
        return problem

    return dataset_problems(dataset, check)


async def evaluate(
    prepared: PreparedEvaluation, client: SamplingClient, step: int
) -> EvaluationResult:
    """Score a client's weights. Raises what the client raises, and UserError if scoring fails."""
    metrics, samples = await prepared.measure(client)
    name, metric = prepared.spec.name, prepared.spec.score_metric
    return EvaluationResult(name, step, metrics[metric], metrics, samples)


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; the first error ends the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        first = errors.exceptions[0]
        raise first from first.__cause__
    return [task.result() for task in tasks]


# --- the model answers --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Question:
    """A row to be answered: its prompt as tokens and as a person reads it, and its seed."""

    row: Row
    place: str
    tokens: list[int] = field(repr=False)
    prompt: str
    expected: str
    seed: int


@dataclass(frozen=True)
class Benchmark(PreparedEvaluation):
    """The model answers each row once or several times; a verifier scores the answers."""

    questions: list[Question]
    section: VerifierSection
    verifier: Verifier
    stop: list[int]

    @classmethod
    def of(
        cls,
        spec: EvaluationSpec,
        dataset: Dataset,
        tokenizer: Tokenizer,
        verifier: tuple[VerifierSection, Verifier],
        seed: int,
    ) -> Benchmark:
        """Render the prompts. Raises UserError naming each row that the template refuses."""
        problems: list[Problem] = []
        questions: list[Question] = []
        for index, (row, place) in enumerate(zip(dataset.rows, dataset.places, strict=True)):
            try:
                questions.append(_question(spec, row, place, tokenizer, row_seed(seed, index)))
            except UserError as error:
                problems.extend(error.problems)
        if problems:
            raise UserError(*shorten(problems))
        return cls(spec, tokenizer, questions, *verifier, stop_tokens(tokenizer))

    async def bind(self, backend: Backend) -> None:
        """Give a verifier that asks a model the backend to open it on."""
        await bind(self.verifier, backend, self.tokenizer)

    def code(self) -> list[object]:
        """The verifier, and what it calls."""
        return code_behind(self.verifier)

    def content(self) -> Any:
        """Each prompt as tokens, its seed, and the row that its answers are scored against."""
        return [(question.tokens, question.seed, question.row) for question in self.questions]

    async def measure(self, client: SamplingClient) -> tuple[dict[str, float], Sequence[AnySample]]:
        """Rewards, how often answers pass, and the share of answers cut at `max_tokens`."""
        places = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

        async def one(question: Question) -> list[tuple[Sample, bool]]:
            async with places:
                answers = await self._ask(client, question)
            return await _all(self._score(question, sequence) for sequence in answers.sequences)

        answered = await _all(one(question) for question in self.questions)
        rewards_P_N = [[sample.reward for sample, _ in answers] for answers in answered]
        cut = [was_cut for answers in answered for _, was_cut in answers]
        metrics = {
            **reward_metrics(rewards_P_N, self.spec.pass_threshold, self.spec.pass_at),
            "n": float(len(self.questions)),
            "answers_cut": sum(cut) / len(cut),
        }
        return metrics, [sample for answers in answered for sample, _ in answers]

    async def _ask(self, client: SamplingClient, question: Question) -> tinker_types.SampleResponse:
        from tinker import types as tinker_types

        params = tinker_types.SamplingParams(
            max_tokens=self.spec.max_tokens,
            temperature=self.spec.temperature,
            seed=question.seed,
            stop=self.stop,
        )
        prompt = tinker_types.ModelInput.from_ints(question.tokens)
        return await client.sample(prompt, self.spec.num_samples, params)

    async def _score(
        self, question: Question, sequence: tinker_types.SampledSequence
    ) -> tuple[Sample, bool]:
        """The scored answer, and whether it was cut off at `max_tokens`."""
        tokens = list(sequence.tokens)
        while tokens and tokens[-1] in self.stop:
            tokens.pop()
        completion = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
        reward = await score(
            self.section,
            self.verifier,
            question.row,
            completion,
            where=f"evaluations.{self.spec.name}.verifier",
            place=question.place,
        )
        sample = Sample(question.prompt, completion, question.expected, reward)
        return sample, sequence.stop_reason == "length"


def row_seed(seed: int, index: int) -> int:
    """What the answers to a row are drawn with: another one for each row, the same at each step."""
    return int(np.random.SeedSequence((seed, index)).generate_state(1)[0])


def _question(
    spec: EvaluationSpec, row: Row, place: str, tokenizer: Tokenizer, seed: int
) -> Question:
    example = read_example(row)
    expected = expected_answer(row)
    if isinstance(example, PlainText):
        tokens = plain_prompt(example.prompt, tokenizer)
        return Question(row, place, tokens, example.prompt, expected, seed)
    messages = example.messages[: last_assistant(example.messages)]
    if spec.system_prompt and messages[0]["role"] not in ("system", "developer"):
        messages = [{"role": "system", "content": spec.system_prompt}, *messages]
    tokens = chat_prompt(messages, tokenizer, example.tools, place, example.template_kwargs)
    return Question(row, place, tokens, _shown_prompt(row), expected, seed)


def _shown_prompt(row: Row) -> str:
    """What a person reads of a row's prompt: the turn before the answer."""
    example = read_example(row)
    if isinstance(example, PlainText):
        return example.prompt
    before = example.messages[last_assistant(example.messages) - 1]
    return str(before.get("content") or "")


# --- the model is shown the answers -------------------------------------------------------------


@dataclass(frozen=True)
class HeldOutNLL(PreparedEvaluation):
    """The negative log-likelihood of the rows' answers, rendered and masked as sft does it."""

    rows: list[Rendered]
    texts: list[tuple[str, str]]
    """Of each row, its prompt and its answer as a person reads them."""
    text_bytes: int
    """UTF-8 bytes of all supervised text."""
    rows_cut: int

    @classmethod
    def of(cls, spec: EvaluationSpec, dataset: Dataset, tokenizer: Tokenizer) -> HeldOutNLL:
        """Render the rows, cut where the sampler would not have room for one more token."""
        rendering = render_rows(dataset, tokenizer, spec.supervise, longest_scored(tokenizer))
        at = dict(zip(dataset.places, dataset.rows, strict=True))
        rows = list(rendering.rows)
        texts = [(_shown_prompt(at[row.place]), expected_answer(at[row.place])) for row in rows]
        size = sum(_text_bytes(row, tokenizer) for row in rows)
        return cls(spec, tokenizer, rows, texts, size, rendering.cut)

    def content(self) -> Any:
        """Each row's tokens and which of them count."""
        return [(row.tokens.tolist(), row.mask.tolist()) for row in self.rows]

    async def measure(self, client: SamplingClient) -> tuple[dict[str, float], Sequence[AnySample]]:
        """Nats per supervised token over all rows, perplexity, and bits per byte of the text."""
        sums = [-each for each in await supervised_logprobs(client, self.rows, self.spec.name)]
        counts = [int(row.mask[1:].sum()) for row in self.rows]
        metrics = {
            **likelihood_metrics(math.fsum(sums), sum(counts), self.text_bytes),
            "tokens": float(sum(counts)),
            "n": float(len(self.rows)),
            "rows_cut": float(self.rows_cut),
        }
        samples = [
            ScoredRow(prompt, expected, nll_sum / count, count)
            for (prompt, expected), nll_sum, count in zip(self.texts, sums, counts, strict=True)
        ]
        return metrics, samples


async def supervised_logprobs(
    client: SamplingClient, rows: Sequence[Rendered], name: str
) -> list[float]:
    """Of each row the sum of its supervised tokens' logprobs, for the evaluation of that name.

    Raises UserError naming a row that the server does not score.
    """
    places = asyncio.Semaphore(REQUESTS_IN_FLIGHT)

    async def one(row: Rendered) -> float:
        async with places:
            return await _logprob_sum(client, row, name)

    return await _all(one(row) for row in rows)


async def _logprob_sum(client: SamplingClient, row: Rendered, name: str) -> float:
    """The token that has to be sampled is thrown away."""
    from tinker import types as tinker_types

    params = tinker_types.SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    prompt = tinker_types.ModelInput.from_ints(row.tokens.tolist())
    answer = await client.sample(prompt, 1, params, include_prompt_logprobs=True)
    given = (answer.prompt_logprobs or [None] * len(row.tokens))[1:]
    logprobs = [p for p, counts in zip(given, row.mask[1:], strict=True) if counts]
    known = [logprob for logprob in logprobs if logprob is not None]
    if len(known) < len(logprobs):
        what = f"the server gave no log-probabilities of {row.place}"
        raise UserError(Problem(f"evaluations.{name}", what, "take a server that scores prompts"))
    return math.fsum(known)


def _text_bytes(row: Rendered, tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of a row's supervised text; special tokens have none."""
    pairs = zip(row.tokens[1:].tolist(), row.mask[1:].tolist(), strict=True)
    spans = [
        [token for token, _ in span] for on, span in groupby(pairs, key=lambda pair: pair[1]) if on
    ]
    return sum(len(tokenizer.decode(span, skip_special_tokens=True).encode()) for span in spans)


# --- the model is shown two answers -------------------------------------------------------------


@dataclass(frozen=True)
class HeldOutPreference(PreparedEvaluation):
    """Which of a row's two answers is likelier, each rendered and masked as dpo does it."""

    answers: list[Rendered]
    """Of each row the chosen answer and then the rejected one, behind their prompt."""
    texts: list[tuple[str, str, str]]
    """Of each row, prompt, chosen and rejected answer as a person reads them."""
    rows_cut: int

    @classmethod
    def of(cls, spec: EvaluationSpec, dataset: Dataset, tokenizer: Tokenizer) -> HeldOutPreference:
        """Render the pairs, cut where the sampler would not have room for one more token."""
        done = render_pairs(dataset, tokenizer, longest_scored(tokenizer))
        answers = [answer for pair in done.pairs for answer in (pair.chosen, pair.rejected)]
        texts = [_shown_pair(dataset.rows[number]) for number in done.numbers]
        return cls(spec, tokenizer, answers, texts, done.cut)

    def content(self) -> Any:
        """The tokens of each answer and which of them count."""
        return [(answer.tokens.tolist(), answer.mask.tolist()) for answer in self.answers]

    async def measure(self, client: SamplingClient) -> tuple[dict[str, float], Sequence[AnySample]]:
        """The share of pairs whose chosen answer is likelier, and by how many nats on average.

        An answer counts with its log-probability, or with that per token (`length_normalized`);
        two that are alike are half a hit.
        """
        scores = await supervised_logprobs(client, self.answers, self.spec.name)
        if self.spec.length_normalized:
            counts = [int(answer.mask[1:].sum()) for answer in self.answers]
            scores = [total / count for total, count in zip(scores, counts, strict=True)]
        margins = [c - r for c, r in zip(scores[::2], scores[1::2], strict=True)]
        hits = [0.5 if margin == 0 else float(margin > 0) for margin in margins]
        metrics = {
            "accuracy": math.fsum(hits) / len(hits),
            "margin": math.fsum(margins) / len(margins),
            "n": float(len(margins)),
            "rows_cut": float(self.rows_cut),
        }
        return metrics, [
            ScoredPair(*text, margin) for text, margin in zip(self.texts, margins, strict=True)
        ]


def _shown_pair(row: Row) -> tuple[str, str, str]:
    """What a person reads of a row's prompt and of its two answers."""
    pair = read_preference(row)
    prompt, chosen, rejected = (
        part if isinstance(part, str) else str(part[-1].get("content") or "")
        for part in (pair.prompt, pair.chosen, pair.rejected)
    )
    return prompt, chosen, rejected
