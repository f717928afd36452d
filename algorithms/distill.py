"""On-policy distillation: do as a larger model would, in the situations one gets oneself into."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from algorithms.base import BaseAlgorithmConfig, RunContext, TrainingBatch
from algorithms.data.shapes import Row, prompt_problem, read_prompt, read_tools
from algorithms.distilling import Distilling, DistillingConfig, Question, Scored
from algorithms.rollouts.scenes import dressed
from algorithms.rollouts.trajectory import Turn
from algorithms.soft_targets import FloatArray
from algorithms.teachers import TeacherSection, check_teacher, open_teacher
from backends.base import Backend, SamplingClient
from backends.errors import Problem
from backends.mock import MockKind

if TYPE_CHECKING:
    from backends.base import ForwardBackwardResult

WHERE = "algorithm.params.teacher"


class DistillConfig(DistillingConfig):
    """What distillation from a teacher can be told."""

    teacher: TeacherSection = Field(
        title="Teacher", description="Whom to learn from: a model, a checkpoint, or both."
    )
    kl_discount_factor: float = Field(
        0.0,
        ge=0,
        le=1,
        description="How much a token answers for the tokens after it; 0: for itself alone.",
    )


class Distill(Distilling):
    """On-policy distillation from a teacher: per-token reverse KL as the advantage."""

    name: ClassVar[str] = "distill"
    Config: ClassVar[type[BaseAlgorithmConfig]] = DistillConfig

    @classmethod
    def check_row(cls, row: Row, place: str) -> Problem | None:
        """A row needs messages or a prompt; its answer may be left out."""
        return prompt_problem(row, place)

    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        """Look at every row, and open the teacher if it speaks the student's vocabulary."""
        await super().setup(ctx, backend)
        section: TeacherSection = self.cfg.teacher
        if ctx.config.backend.kind != MockKind.kind:  # its models are only names
            student = ctx.config.model.name
            await asyncio.to_thread(check_teacher, section, student, ctx.tokenizer, WHERE)
        self._teacher = await open_teacher(backend, section, WHERE)

    def question(self, row: Row, place: str) -> Question:
        """The turns up to the answer, the same for student and teacher."""
        cfg: DistillConfig = self.cfg
        asked = read_prompt(row)
        if not isinstance(asked, str):
            asked = dressed(asked, cfg.system_prompt, cfg.user_template)
        prompt = self._voice.of(row).opening(asked, read_tools(row), place).prompt.tokens
        messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        return Question(messages, prompt, prompt)

    async def teacher(self, step_idx: int) -> SamplingClient:
        """Always the same."""
        return self._teacher

    def counted(self, turn: Turn, seen: int) -> npt.NDArray[np.bool_]:
        """Every token."""
        return np.ones(len(turn.tokens), np.bool_)

    def batch(self, scored: Sequence[Scored]) -> TrainingBatch:
        """Each token's advantage is how much likelier the teacher finds it than the student."""
        factor = self.cfg.kl_discount_factor
        data = [one.datum(discounted(one.log_ratios(), factor)) for one in scored]
        total = sum(len(one.turn.tokens) for one in scored)
        metrics = {"distill/total_completion_tokens": float(total)}
        return TrainingBatch(data, "importance_sampling", metrics=metrics)

    def step_metrics(
        self, step_idx: int, batch: TrainingBatch, fb_result: ForwardBackwardResult
    ) -> dict[str, float]:
        """`train_mean_nll`, in nats a sampled token."""
        return self.policy_metrics(batch, fb_result)


def discounted(rewards_T: FloatArray, factor: float) -> FloatArray:
    """A_t = sum over s >= t of factor^(s - t) * r_s, [T]; the rewards themselves for factor 0.

    With r_t = log q(y_t) - log p(y_t), teacher to student, the expected gradient of sum_t r * A is
    that of -KL(student || teacher) for each next token (factor 0) or for the whole rest of the
    answer (factor 1). Source: GKD, arXiv 2306.13649; tinker-cookbook, `train_on_policy`.
    """
    advantages = np.asarray(rewards_T, np.float64).copy()
    for t in range(len(advantages) - 2, -1, -1):
        advantages[t] += factor * advantages[t + 1]
    return advantages
