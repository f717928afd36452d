"""Self-distillation: learn from oneself as one would answer with a demonstration in view."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from algorithms.base import BaseAlgorithmConfig, RunContext, TrainingBatch
from algorithms.data.shapes import (
    Conversation,
    Message,
    PlainText,
    Row,
    expected_answer,
    last_assistant,
    read_example,
    row_problem,
)
from algorithms.distilling import Distilling, DistillingConfig, Question, Scored
from algorithms.kept import code_version
from algorithms.rollouts.scenes import dressed
from algorithms.rollouts.trajectory import Turn
from algorithms.soft_targets import entropy, reverse_kl, soft_datum, soft_loss
from algorithms.teachers import SyncedTeacher, open_start
from backends.base import Backend, SamplingClient
from backends.errors import Problem
from backends.storage.objects import open_store

if TYPE_CHECKING:
    from backends.base import ForwardBackwardResult

DEMO_TEMPLATE = """{prompt}

Here is an example of a good answer to this:

{answer}

Now give an answer of your own."""


class SDFTConfig(DistillingConfig):
    """What self-distillation can be told."""

    mode: Literal["forward_kl", "reverse_kl", "importance_sampling"] = Field(
        "forward_kl",
        description="forward_kl and reverse_kl compare the teacher's likeliest tokens at each "
        "place, importance_sampling only the token that was sampled.",
    )
    topk: int = Field(20, ge=1, description="How many of the teacher's likeliest tokens count.")
    teacher_sync_every: int | None = Field(
        None,
        ge=1,
        description="The teacher takes over the student's weights every n steps; empty: it stays "
        "as the run started.",
    )
    max_context_length: int = Field(
        2048, ge=2, description="Most tokens that the teacher reads; the rest of an answer is cut."
    )
    demo_template: str = Field(
        DEMO_TEMPLATE,
        description="How the last user turn is put to the teacher; {prompt} stands for what it "
        "says, {answer} for the row's answer.",
    )
    skip_first_n_tokens: int = Field(
        3,
        ge=0,
        validate_default=True,
        description="The first tokens of an answer that do not count.",
    )

    @field_validator("demo_template")
    @classmethod
    def _demonstrates(cls, template: str) -> str:
        for name, what in (("{prompt}", "the prompt"), ("{answer}", "the row's answer")):
            if name not in template:
                raise ValueError(f"does not say where {what} goes; put {name} into it")
        return template

    @field_validator("skip_first_n_tokens")
    @classmethod
    def _something_counts(cls, skipped: int, info: ValidationInfo) -> int:
        for name in ("max_tokens", "max_context_length"):
            most = info.data.get(name)
            if most is not None and skipped >= most:
                raise ValueError(
                    f"is {skipped}, and {name} is {most}: no token ever counts; lower the one or "
                    "raise the other"
                )
        return skipped


class SDFT(Distilling):
    """On-policy self-distillation from demonstrations.

    The student answers the bare prompt. The teacher, the same model with frozen or earlier weights,
    reads the prompt with the row's answer as a demonstration, then the student's answer y, and says
    at each token t of it what it would have said. With p the student's distribution there and q
    the teacher's, the loss is the sum over the tokens t >= skip_first_n_tokens of

        forward_kl           -sum_k w_k log p_k, w = q renormalised over the teacher's top K:
                             the gradient of KL(w || p)
        reverse_kl           KL(p || q) over the top K and one bucket for the rest
        importance_sampling  -exp(log p - log p_sampled) A, A = log q(y_t) - log p_sampled(y_t):
                             an estimate of the gradient of KL(p || q) from the sampled token

    Source: Self-Distillation Enables Continual Learning, arXiv 2601.19897; GKD, arXiv 2306.13649.
    """

    name: ClassVar[str] = "sdft"
    Config: ClassVar[type[BaseAlgorithmConfig]] = SDFTConfig

    @classmethod
    def check_row(cls, row: Row, place: str) -> Problem | None:
        """A row needs an answer to be demonstrated, and a user turn to show it in."""
        problem = row_problem(row, place)
        example = None if problem else read_example(row)
        if isinstance(example, Conversation):
            asked = example.messages[: last_assistant(example.messages)]
            if not any(turn["role"] == "user" for turn in asked):
                return Problem(place, "has no user turn before its answer", "add one")
        return problem

    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        """Render what student and teacher read of every row, and open the teacher."""
        await super().setup(ctx, backend)
        cfg: SDFTConfig = self.cfg
        self._frozen = await open_start(backend, ctx.config.model.init_from)
        self._synced = None
        if cfg.teacher_sync_every is not None:
            run, code = open_store(ctx.output_dir), code_version(self)[:12]
            self._synced = SyncedTeacher(
                backend, run, self._frozen, cfg.teacher_sync_every, self.save_steps(), code
            )

    def question(self, row: Row, place: str) -> Question | None:
        """The student reads the prompt, the teacher its demonstration; None if that is too long."""
        cfg: SDFTConfig = self.cfg
        example, answer, voice = read_example(row), expected_answer(row), self._voice.of(row)
        if isinstance(example, PlainText):
            shown = demonstration(cfg.demo_template, example.prompt, answer)
            prompt = voice.opening(example.prompt, None, place).prompt.tokens
            teacher_prompt = voice.opening(shown, None, place).prompt.tokens
            messages: list[Message] = [{"role": "user", "content": example.prompt}]
        else:
            asked = example.messages[: last_assistant(example.messages)]
            messages = dressed(asked, cfg.system_prompt, cfg.user_template)
            lesson = demonstrated(asked, cfg.demo_template, answer)
            prompt = voice.opening(messages, example.tools, place).prompt.tokens
            lesson = dressed(lesson, cfg.system_prompt, None)
            teacher_prompt = voice.opening(lesson, example.tools, place).prompt.tokens
        question = Question(messages, prompt, teacher_prompt)
        return question if self.context_left(question) > cfg.skip_first_n_tokens else None

    async def teacher(self, step_idx: int) -> SamplingClient:
        """Frozen, or the student as it was at the last sync."""
        return self._frozen if self._synced is None else await self._synced.at(step_idx)

    def context_left(self, question: Question) -> int:
        """What max_context_length leaves for an answer."""
        left: int = self.cfg.max_context_length - len(question.teacher_prompt)
        return left

    def no_room(self) -> Problem:
        """What to say when every row was left out."""
        cfg: SDFTConfig = self.cfg
        return Problem(
            "algorithm.params.max_context_length",
            f"the teacher reads {cfg.max_context_length} tokens, and no row's prompt with its "
            f"demonstration leaves room for {cfg.skip_first_n_tokens + 1} more",
            "raise it, or shorten the rows",
        )

    def candidates(self) -> int:
        """The K of the top-K modes."""
        cfg: SDFTConfig = self.cfg
        return 0 if cfg.mode == "importance_sampling" else cfg.topk

    def counted(self, turn: Turn, seen: int) -> npt.NDArray[np.bool_]:
        """All but the first ones, as far as the teacher has read."""
        counted = np.zeros(len(turn.tokens), np.bool_)
        counted[self.cfg.skip_first_n_tokens : seen] = True
        return counted

    def batch(self, scored: Sequence[Scored]) -> TrainingBatch:
        """Soft targets, or an advantage for each token."""
        cfg: SDFTConfig = self.cfg
        cut = sum(len(one.opinion.logprobs) < len(one.turn.tokens) for one in scored)
        metrics = {
            "sdft/total_completion_tokens": float(sum(one.counted.sum() for one in scored)),
            "sdft/teacher_truncated_count": float(cut),
            "sdft/num_datums": float(len(scored)),
        }
        if cfg.mode == "importance_sampling":
            data = [one.datum(one.log_ratios()) for one in scored]
            return TrainingBatch(data, "importance_sampling", metrics=metrics)
        data, entropies = [], []
        for one in scored:
            candidates = one.opinion.candidates
            assert candidates is not None
            targets = candidates.weights()
            entropies.append(entropy(targets)[one.counted[: len(targets)]])
            if cfg.mode == "reverse_kl":
                targets = np.exp(candidates.logprobs)
            data.append(
                soft_datum(one.turn.prompt, one.turn.tokens, candidates.ids, targets, one.counted)
            )
        metrics |= {
            "sdft/topk": float(cfg.topk),
            "sdft/mean_teacher_entropy": float(np.concatenate(entropies).mean()),
        }
        loss_fn = "cross_entropy" if cfg.mode == "forward_kl" else reverse_kl
        return TrainingBatch(data, loss_fn, metrics=metrics)

    def step_metrics(
        self, step_idx: int, batch: TrainingBatch, fb_result: ForwardBackwardResult
    ) -> dict[str, float]:
        """Nats a position that counts, before the step.

        `train_mean_nll` is -log p of the soft targets or of the sampled token; `kl/forward` the KL
        of the soft targets from p; `kl/reverse` that of the reverse_kl loss.
        """
        if self.cfg.mode == "importance_sampling":
            return self.policy_metrics(batch, fb_result)
        loss = soft_loss(batch.data, fb_result)
        metrics = {"train_mean_nll": loss.nll, "kl/forward": loss.forward_kl}
        if self.cfg.mode == "reverse_kl":
            metrics["kl/reverse"] = fb_result.metrics["loss:sum"] / loss.positions
        return metrics


def demonstration(template: str, prompt: str, answer: str) -> str:
    """The template with the two put in; braces in either stay as they are."""
    values = {"{prompt}": prompt, "{answer}": answer}
    return re.sub(r"\{prompt\}|\{answer\}", lambda match: values[match[0]], template)


def demonstrated(messages: list[Message], template: str, answer: str) -> list[Message]:
    """Messages whose last user turn shows the answer as a demonstration."""
    last = max(index for index, turn in enumerate(messages) if turn["role"] == "user")
    content = demonstration(template, str(messages[last]["content"]), answer)
    return [*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]]
