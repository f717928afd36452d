"""On-policy distillation: the student answers, and a teacher scores every token of the answers.

What `sdft` and `distill` share: their questions, the student's samples, and how these are told.
"""

from __future__ import annotations

import asyncio
import math
import time
from abc import abstractmethod
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from algorithms.base import (
    BaseAlgorithm,
    BaseAlgorithmConfig,
    RunContext,
    TrainingBatch,
    Transcript,
)
from algorithms.data.dataset import Dataset
from algorithms.data.order import batch_rows, steps_per_epoch
from algorithms.data.rendering import model_limit, stop_tokens
from algorithms.data.shapes import Message, Row
from algorithms.data.spool import Lazy
from algorithms.rollouts.chat import Voice
from algorithms.rollouts.runner import seed_of, together
from algorithms.rollouts.trajectory import Turn, sampled_turn, segments, to_datum
from algorithms.soft_targets import FloatArray, Opinion, opinion
from backends.base import Backend, SamplingClient
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    import tinker

    from backends.base import ForwardBackwardResult


class DistillingConfig(BaseAlgorithmConfig):
    """What on-policy distillation can be told."""

    batch_size: int = Field(32, ge=1, description="Prompts in each optimizer step.")
    temperature: float = Field(1.0, ge=0, description="Of the student's sampling.")
    num_samples: int = Field(1, ge=1, description="The student's answers to each prompt.")
    max_tokens: int = Field(256, ge=1, description="Longest answer, in tokens.")
    system_prompt: str | None = Field(
        None, description="Put before conversations that have no system turn of their own."
    )
    user_template: str | None = Field(
        None,
        description="How the last user turn is put to the student; {prompt} stands for what it "
        "says.",
    )
    log_rollouts: int = Field(16, ge=0, description="Transcripts that are kept of each step.")

    @field_validator("num_samples")
    @classmethod
    def _not_all_alike(cls, num_samples: int, info: ValidationInfo) -> int:
        if num_samples > 1 and info.data.get("temperature") == 0:
            raise ValueError(
                f"is {num_samples}, but at temperature 0 all answers to a prompt are the same; "
                "take 1, or raise temperature"
            )
        return num_samples

    @field_validator("user_template")
    @classmethod
    def _has_the_prompt(cls, template: str | None) -> str | None:
        if template is not None and "{prompt}" not in template:
            raise ValueError("does not say where the prompt goes; put {prompt} into it")
        return template


@dataclass(frozen=True, slots=True)
class Question:
    """A row's prompt as it is read: by a person, by the student, and by the teacher."""

    messages: list[Message]
    prompt: list[int]
    teacher_prompt: list[int]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """An answer of the student, what the teacher thinks of it, and which of its tokens count [T].

    The opinion is of the answer's beginning where the rest did not fit the teacher's context.
    """

    group: int
    question: Question
    turn: Turn
    opinion: Opinion
    counted: npt.NDArray[np.bool_]

    def log_ratios(self) -> FloatArray:
        """log q(y_t) - log p(y_t) at each token [T], teacher to student; 0 where none counts."""
        ratios = np.zeros(len(self.turn.tokens))
        seen = len(self.opinion.logprobs)
        ratios[:seen] = self.opinion.logprobs - np.asarray(self.turn.logprobs[:seen])
        return np.where(self.counted, ratios, 0.0)

    def datum(self, advantages_T: FloatArray) -> tinker.Datum:
        """The answer under a policy-gradient loss, with an advantage for each of its tokens."""
        (segment,) = segments([self.turn])
        before = np.zeros(len(self.turn.prompt))
        return to_datum(segment, np.concatenate([before, advantages_T]))


class Distilling(BaseAlgorithm):
    """A student that is sampled, and a teacher that scores its tokens."""

    on_policy: ClassVar[bool] = True

    @abstractmethod
    def question(self, row: Row, place: str) -> Question | None:
        """A row's prompts; None for one that cannot be taught and is left out."""

    @abstractmethod
    async def teacher(self, step_idx: int) -> SamplingClient:
        """Whose opinion counts in a step, asked once its student is at hand."""

    @abstractmethod
    def counted(self, turn: Turn, seen: int) -> npt.NDArray[np.bool_]:
        """Which tokens of an answer [T] are trained on; the teacher has read `seen` of them."""

    @abstractmethod
    def batch(self, scored: Sequence[Scored]) -> TrainingBatch:
        """The examples and their loss; each answer has a token that counts."""

    def context_left(self, question: Question) -> int:
        """How many tokens of an answer the teacher reads."""
        cfg: DistillingConfig = self.cfg
        return cfg.max_tokens

    def no_room(self) -> Problem:
        """What to say when every row was left out."""
        what = "no row's prompt leaves room for an answer in the model's context"
        return Problem("algorithm.params.max_tokens", what, "lower it, or shorten the prompts")

    def candidates(self) -> int:
        """How many of its likeliest tokens the teacher is asked for at each place."""
        return 0

    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        """Render the prompts of every row; raises UserError naming each that will not do.

        Those of rows on disk are rendered again when their step comes.
        """
        cfg: DistillingConfig = self.cfg
        self._voice = Voice(
            tokenizer=ctx.tokenizer,
            stop=stop_tokens(ctx.tokenizer),
            max_tokens=cfg.max_tokens,
            temperature=cfg.temperature,
            max_context=model_limit(ctx.tokenizer),
        )
        await asyncio.to_thread(self._render, ctx.dataset)
        self._policy, self._seed = ctx.policy, ctx.config.seed
        self._steps_per_epoch = steps_per_epoch(len(self._questions), cfg.batch_size)

    def _render(self, dataset: Dataset) -> None:
        questions: list[Question] = []
        numbers = array("q")
        problems: list[Problem] = []
        for number, (row, place) in enumerate(zip(dataset.rows, dataset.places, strict=True)):
            problem = self.check_row(row, place) or self._plain_problem(row, place)
            if problem is not None:
                problems.append(problem)
                continue
            try:
                question = self.question(row, place)
            except UserError as error:
                problems.extend(error.problems)
                continue
            if question is not None and self._voice.fits(question.prompt):
                numbers.append(number)
                if not dataset.on_disk:
                    questions.append(question)
        self._skipped = dataset.bad_rows.skip(problems).skipped
        self._dropped = len(dataset) - len(problems) - len(numbers)
        if not numbers:
            raise UserError(self.no_room())
        self._questions: Sequence[Question] = (
            self._on_demand(dataset, numbers) if dataset.on_disk else questions
        )

    def _on_demand(self, dataset: Dataset, numbers: Sequence[int]) -> Sequence[Question]:
        """The questions of these rows, which have been rendered once."""

        def render(index: int) -> Question:
            number = numbers[index]
            question = self.question(dataset.rows[number], dataset.places[number])
            assert question is not None
            return question

        return Lazy(len(numbers), render)

    def _plain_problem(self, row: Row, place: str) -> Problem | None:
        if isinstance(row.get("prompt"), str) and (
            self.cfg.system_prompt or self.cfg.user_template
        ):
            what = "a plain prompt, which takes no system_prompt or user_template"
            return Problem(place, what, "give the row as messages, or leave these out")
        return None

    async def build_batch(self, step_idx: int) -> TrainingBatch:
        """Answers to the step's prompts from the weights as they are, scored by the teacher."""
        picked = batch_rows(len(self._questions), self.cfg.batch_size, self._seed, step_idx)
        questions = await asyncio.to_thread(lambda: [self._questions[index] for index in picked])
        started = time.monotonic()
        student = await self._policy.sampler(step_idx)
        drawn = await together(
            self._answers(student, step_idx, group, question)
            for group, question in enumerate(questions)
        )
        sampled = time.monotonic()
        teacher = await self.teacher(step_idx)
        scored = await together(
            self._score(teacher, group, questions[group], turn)
            for group, turns in enumerate(drawn)
            for turn in turns
        )
        taught = [one for one in scored if one.counted.any()]
        batch = self.batch(taught) if taught else TrainingBatch([], "cross_entropy")
        batch.metrics |= answer_metrics(scored) | {
            "time/sampling": sampled - started,
            "time/teacher": time.monotonic() - sampled,
        }
        batch.transcripts = [self._transcript(one) for one in scored[: self.cfg.log_rollouts]]
        return batch

    async def _answers(
        self, student: SamplingClient, step: int, group: int, question: Question
    ) -> list[Turn]:
        from tinker import types as tinker_types

        prompt = tinker_types.ModelInput.from_ints(question.prompt)
        params = self._voice.params(seed_of(self._seed, step, group))
        answer = await student.sample(prompt, self.cfg.num_samples, params)
        return [sampled_turn(question.prompt, sequence) for sequence in answer.sequences]

    async def _score(
        self, teacher: SamplingClient, group: int, question: Question, turn: Turn
    ) -> Scored:
        read = turn.tokens[: self.context_left(question)]
        thinks = await opinion(teacher, question.teacher_prompt, read, self.candidates())
        return Scored(group, question, turn, thinks, self.counted(turn, len(read)))

    def _transcript(self, one: Scored) -> Transcript:
        count = int(one.counted.sum())
        mean = math.fsum(one.log_ratios()) / max(count, 1)
        said: Message = {"role": "assistant", "content": self._voice.said(one.turn.tokens)}
        return Transcript(
            one.group,
            [*one.question.messages, said],
            mean,
            mean if count else None,
            "length" if one.turn.cut else "stop",
        )

    def policy_metrics(
        self, batch: TrainingBatch, fb_result: ForwardBackwardResult
    ) -> dict[str, float]:
        """`train_mean_nll` of a policy-gradient batch: -log p in nats a token with an advantage."""
        nll_sum, count = 0.0, 0
        for datum, output in zip(batch.data, fb_result.loss_fn_outputs, strict=True):
            heard = datum.loss_fn_inputs["advantages"].to_numpy() != 0
            nll_sum -= float(output["logprobs"].to_numpy()[heard].astype(np.float64).sum())
            count += int(heard.sum())
        return {"train_mean_nll": nll_sum / count} if count else {}

    def setup_metrics(self) -> dict[str, float]:
        """Rows of an epoch, and how many were left out for want of room, or skipped as bad."""
        return {
            "data/rows": float(len(self._questions)),
            "data/rows_dropped": float(self._dropped),
            "data/rows_skipped": float(self._skipped),
        }


def answer_metrics(scored: Sequence[Scored]) -> dict[str, float]:
    """Of a step's answers, trained on or not; means over answers, or over tokens that count.

    `kl/teacher` is the mean of log p - log q over the sampled tokens that count, an estimate of
    KL(student || teacher) in nats a token; `reward/mean` is the mean over answers of the negative.
    """
    ratios = np.concatenate([one.log_ratios()[one.counted] for one in scored])
    logprobs = np.concatenate([np.asarray(one.turn.logprobs) for one in scored])
    each = [math.fsum(one.log_ratios()) / max(int(one.counted.sum()), 1) for one in scored]
    return {
        "kl/teacher": -math.fsum(ratios) / max(len(ratios), 1),
        "reward/mean": math.fsum(each) / len(each),
        "rollout/tokens": len(logprobs) / len(scored),
        "rollout/truncated": sum(one.turn.cut for one in scored) / len(scored),
        "sampling/entropy": -math.fsum(logprobs) / len(logprobs),
    }
