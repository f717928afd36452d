"""Supervised fine-tuning with TRL's SFTTrainer, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from algorithms.base import BaseAlgorithmConfig, RunContext
from algorithms.data.rendering import Supervise, render_rows
from algorithms.data.shapes import Row, supervised_problem
from algorithms.local.algorithm import LocalAlgorithm
from algorithms.local.options import LocalConfig, Refusals
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from algorithms.data.rendering import Rendering
    from algorithms.local.trainer import RunsTrainer

NO_LABEL = -100
"""What transformers takes for "no loss here" among labels."""


class LocalSFTConfig(LocalConfig):
    """What supervised fine-tuning with TRL can be told."""

    REFUSED_TOO: ClassVar[Refusals] = {"the loss is a sum over tokens": ("label_smoothing_factor",)}

    max_seq_len: int | None = Field(
        None, ge=2, description="Rows are cut at this many tokens; empty: at the model's limit."
    )
    supervise: Supervise = Field(
        "all_assistant", description="Which assistant turns of a conversation get loss."
    )
    reduction: Literal["sum", "mean"] = Field(
        "sum",
        description="Of the loss over a step's supervised tokens: sum as in sft, mean as TRL does "
        "it by itself.",
    )

    @model_validator(mode="after")
    def _added_to_a_mean(self) -> LocalSFTConfig:
        if _router_loss(self) and self.reduction == "sum":
            raise ValueError(
                "trainer.router_aux_loss_coef weighs a loss beside a mean: set reduction: mean"
            )
        return self


class LocalSFT(LocalAlgorithm):
    """Supervised fine-tuning on this machine, with TRL's SFTTrainer."""

    name: ClassVar[str] = "local_sft"
    Config: ClassVar[type[BaseAlgorithmConfig]] = LocalSFTConfig

    @classmethod
    def check_row(cls, row: Row, place: str) -> Problem | None:
        """A row needs an assistant turn or a completion."""
        return supervised_problem(row, place)

    @classmethod
    def options_class(cls) -> type:
        """TRL's SFTConfig."""
        from trl import SFTConfig

        config: type = SFTConfig
        return config

    def prepare(self, ctx: RunContext) -> int:
        """Render every row to tokens and loss mask, as sft does."""
        cfg: LocalSFTConfig = self.cfg
        self._rendering = render_rows(
            ctx.dataset, ctx.tokenizer, cfg.supervise, self.longest_row(cfg.max_seq_len)
        )
        for row in self._rendering.rows:
            if set(row.weights.tolist()) - {0.0, 1.0}:
                what = "has a weight other than 0 and 1, and TRL counts every token once"
                raise UserError(Problem(row.place, what, "remove it, or use sft"))
        return len(self._rendering.rows)

    def trainer(self, arguments: dict[str, Any]) -> RunsTrainer:
        """An SFTTrainer on the rendered rows, with the reduction that was asked for."""
        from trl import SFTTrainer

        from algorithms.local.trainer import owned

        base = _summing(SFTTrainer) if self.cfg.reduction == "sum" else SFTTrainer
        extra = {"max_length": None, "dataset_kwargs": {"skip_prepare_dataset": True}}
        options = self.options(arguments | extra)
        self._is_nll = options.loss_type == "nll" and not _router_loss(self.cfg)
        trainer: RunsTrainer = owned(base, "LocalSFT")(
            model=self.backend.model,
            args=options,
            train_dataset=_dataset(self._rendering),
            processing_class=self.context.tokenizer,
        )
        return trainer

    def metrics(self, step_idx: int, logs: Mapping[str, float]) -> dict[str, float]:
        """`train_mean_nll` as sft has it: nats per supervised token, before the step.

        Under another loss of TRL's, `loss` is what that says of a token.
        """
        rows = [self._rendering.rows[index] for index in self.step_rows(step_idx)]
        supervised = float(sum(int(row.mask[1:].sum()) for row in rows))
        loss = logs["loss"] / supervised if self.cfg.reduction == "sum" else logs["loss"]
        name = "train_mean_nll" if self._is_nll else "loss"
        return {
            name: loss,
            "tokens/supervised": supervised,
            "tokens/total": float(sum(len(row.tokens) - 1 for row in rows)),
        }

    def setup_metrics(self) -> dict[str, float]:
        """Rows and tokens of an epoch, and how many rows were cut, dropped, or skipped as bad."""
        return self._rendering.metrics()


def _router_loss(cfg: LocalSFTConfig) -> bool:
    """Whether TRL is to add a mixture's load-balancing loss."""
    return bool(cfg.trainer.get("router_aux_loss_coef"))


def _dataset(rendering: Rendering) -> Any:
    """Token ids, and labels where the loss counts."""
    from datasets import Dataset

    rows = (
        {
            "input_ids": row.tokens.tolist(),
            "labels": [
                token if on else NO_LABEL
                for token, on in zip(row.tokens.tolist(), row.mask.tolist(), strict=True)
            ],
        }
        for row in rendering.rows
    )
    return Dataset.from_list(list(rows))


def _summing(trainer: type) -> type:
    """The trainer with a loss that is a sum over tokens: a mean over one."""

    class Summing(trainer):  # type: ignore[misc]
        def compute_loss(
            self,
            model: Any,
            inputs: Any,
            return_outputs: bool = False,
            num_items_in_batch: Any = None,
        ) -> Any:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch=1)

    return Summing
