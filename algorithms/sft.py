"""Supervised fine-tuning: learn to say what the assistant says in the rows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from algorithms.base import BaseAlgorithm, BaseAlgorithmConfig, RunContext, TrainingBatch
from algorithms.data.order import PackedOrder, batch_rows, steps_per_epoch
from algorithms.data.rendering import Rendering, Supervise, render_rows, to_datum
from algorithms.data.shapes import Row, supervised_problem
from backends.base import Backend
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from backends.base import ForwardBackwardResult


class SFTConfig(BaseAlgorithmConfig):
    """What supervised fine-tuning can be told."""

    max_seq_len: int | None = Field(
        None, ge=2, description="Rows are cut at this many tokens; empty: at the model's limit."
    )
    supervise: Supervise = Field(
        "all_assistant", description="Which assistant turns of a conversation get loss."
    )
    max_tokens_per_batch: int | None = Field(
        None,
        ge=1,
        description="Instead of batch_size: a step takes rows until the next one would bring it "
        "above this many tokens.",
    )


class SFT(BaseAlgorithm):
    """Supervised fine-tuning on conversations, prompt/completion pairs, or rows of tokens.

    The loss of a batch is -sum(w * log p) over its tokens, with w the weight of the row times that
    of the turn or the token.
    """

    name: ClassVar[str] = "sft"
    Config: ClassVar[type[BaseAlgorithmConfig]] = SFTConfig

    @classmethod
    def check_row(cls, row: Row, place: str) -> Problem | None:
        """A row needs an assistant turn or a completion, or is tokens and their weights."""
        return supervised_problem(row, place)

    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        """Render every row to tokens and loss mask; rows on disk again when their step comes."""
        cfg: SFTConfig = self.cfg
        self._rendering = await asyncio.to_thread(
            render_rows, ctx.dataset, ctx.tokenizer, cfg.supervise, cfg.max_seq_len
        )
        self._seed = ctx.config.seed
        self._packed = None
        self._steps_per_epoch = steps_per_epoch(len(self._rendering.rows), cfg.batch_size)
        if (budget := cfg.max_tokens_per_batch) is not None:
            _check_fits(self._rendering, budget)
            self._packed = PackedOrder(self._rendering.lengths, budget, self._seed)
            await asyncio.to_thread(self._packed.steps, cfg.num_epochs)
            self._steps_per_epoch = self._packed.steps(1)

    async def build_batch(self, step_idx: int) -> TrainingBatch:
        """The step's rows in the epoch's order; the last batch of an epoch may be smaller."""
        rows = self._rendering.rows
        if self._packed is not None:
            picked = self._packed.rows(step_idx)
        else:
            picked = batch_rows(len(rows), self.cfg.batch_size, self._seed, step_idx)
        data = await asyncio.to_thread(lambda: [to_datum(rows[index]) for index in picked])
        return TrainingBatch(data, loss_fn="cross_entropy")

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, to the last epoch's own packing."""
        if self._packed is None or self.cfg.max_steps is not None:
            return super().total_steps
        return self._packed.steps(self.cfg.num_epochs)

    def cursor(self, step_idx: int) -> tuple[int, int]:
        """The epoch of a step, and which step of it that is."""
        return super().cursor(step_idx) if self._packed is None else self._packed.cursor(step_idx)

    def step_metrics(
        self, step_idx: int, batch: TrainingBatch, fb_result: ForwardBackwardResult
    ) -> dict[str, float]:
        """`train_mean_nll`: nats per supervised token, -sum(w * logp) / sum(w), before the step."""
        nll_sum = weight_sum = supervised = 0.0
        for datum, output in zip(batch.data, fb_result.loss_fn_outputs, strict=True):
            weights = datum.loss_fn_inputs["weights"].to_numpy().astype("float64")
            nll_sum -= float(weights @ output["logprobs"].to_numpy().astype("float64"))
            weight_sum += float(weights.sum())
            supervised += float((weights > 0).sum())
        return {
            "train_mean_nll": nll_sum / weight_sum,
            "tokens/supervised": supervised,
            "tokens/total": float(sum(datum.model_input.length for datum in batch.data)),
        }

    def setup_metrics(self) -> dict[str, float]:
        """Rows and tokens of an epoch, and how many rows were cut, dropped, or skipped as bad."""
        return self._rendering.metrics()


def _check_fits(rendering: Rendering, budget: int) -> None:
    """Raise UserError naming the longest row if it is more than a batch may hold."""
    longest = max(range(len(rendering.lengths)), key=lambda index: rendering.lengths[index])
    if rendering.lengths[longest] > budget:
        raise UserError(
            Problem(
                "algorithm.params.max_tokens_per_batch",
                f"{rendering.rows[longest].place} has {rendering.lengths[longest]} tokens, and a "
                f"batch may hold {budget}",
                "raise it, or cut rows by max_seq_len",
            )
        )
