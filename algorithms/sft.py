"""Supervised fine-tuning: learn to say what the assistant says in the rows."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from algorithms.base import BaseAlgorithm, BaseAlgorithmConfig, RunContext, TrainingBatch
from algorithms.data.order import batch_rows, steps_per_epoch
from algorithms.data.rendering import Supervise, render_rows, to_datum
from algorithms.data.shapes import Row, row_problem
from backends.base import Backend
from backends.errors import Problem

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


class SFT(BaseAlgorithm):
    """Supervised fine-tuning on conversations or prompt/completion pairs."""

    name: ClassVar[str] = "sft"
    Config: ClassVar[type[BaseAlgorithmConfig]] = SFTConfig

    @classmethod
    def check_row(cls, row: Row, place: str) -> Problem | None:
        """A row needs an assistant turn or a completion."""
        return row_problem(row, place)

    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        """Render every row to tokens and loss mask; rows on disk again when their step comes."""
        cfg: SFTConfig = self.cfg
        self._rendering = await asyncio.to_thread(
            render_rows, ctx.dataset, ctx.tokenizer, cfg.supervise, cfg.max_seq_len
        )
        self._seed = ctx.config.seed
        self._steps_per_epoch = steps_per_epoch(len(self._rendering.rows), cfg.batch_size)

    async def build_batch(self, step_idx: int) -> TrainingBatch:
        """The step's rows in the epoch's order; the last batch of an epoch may be smaller."""
        rows = self._rendering.rows
        picked = batch_rows(len(rows), self.cfg.batch_size, self._seed, step_idx)
        data = await asyncio.to_thread(lambda: [to_datum(rows[index]) for index in picked])
        return TrainingBatch(data, loss_fn="cross_entropy")

    def step_metrics(
        self, step_idx: int, batch: TrainingBatch, fb_result: ForwardBackwardResult
    ) -> dict[str, float]:
        """`train_mean_nll`: nats per supervised token, -sum(w * logp) / sum(w), before the step."""
        nll_sum = weight_sum = 0.0
        for datum, output in zip(batch.data, fb_result.loss_fn_outputs, strict=True):
            weights = datum.loss_fn_inputs["weights"].to_numpy().astype("float64")
            nll_sum -= float(weights @ output["logprobs"].to_numpy().astype("float64"))
            weight_sum += float(weights.sum())
        return {
            "train_mean_nll": nll_sum / weight_sum,
            "tokens/supervised": weight_sum,
            "tokens/total": float(sum(datum.model_input.length for datum in batch.data)),
        }

    def setup_metrics(self) -> dict[str, float]:
        """Rows and tokens of an epoch, and how many rows were cut, dropped, or skipped as bad."""
        done = self._rendering
        return {
            "data/rows": float(len(done.rows)),
            "data/rows_cut": float(done.cut),
            "data/rows_dropped": float(done.dropped),
            "data/rows_skipped": float(done.skipped),
            "data/tokens": float(done.tokens_total),
            "data/tokens_supervised": float(done.tokens_supervised),
        }
