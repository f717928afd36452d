"""Direct preference optimisation with TRL's DPOTrainer, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from algorithms.base import BaseAlgorithmConfig, RunContext
from algorithms.data.pairs import render_pairs
from algorithms.data.shapes import Row, preference_problem
from algorithms.local.algorithm import LocalAlgorithm
from algorithms.local.options import LocalConfig, Refusals
from backends.errors import Problem

if TYPE_CHECKING:
    from algorithms.data.pairs import Pair
    from algorithms.data.rendering import Rendered
    from algorithms.local.trainer import RunsTrainer


class LocalDPOConfig(LocalConfig):
    """What direct preference optimisation with TRL can be told."""

    REFUSED_TOO: ClassVar[Refusals] = {
        "it is a parameter of its own": ("beta", "label_smoothing", "loss_type"),
        "the reference is what the run starts from, all along": (
            "sync_ref_model",
            "ref_model_mixup_alpha",
            "ref_model_sync_steps",
            "precompute_ref_log_probs",
            "precompute_ref_batch_size",
        ),
    }

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of AdamW.")
    batch_size: int = Field(32, ge=1, description="Pairs in each optimizer step.")
    loss_type: Literal["sigmoid", "sigmoid_norm", "ipo", "robust"] = Field(
        "sigmoid",
        description="As TRL names them: sigmoid is DPO, sigmoid_norm the same with scores per "
        "token, ipo takes the margin per token to 1 / (2 beta), robust allows for wrong labels.",
    )
    beta: float = Field(0.1, gt=0, description="How much a margin counts; the tau of ipo.")
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="The share of pairs whose answers may stand the wrong way."
    )
    max_seq_len: int | None = Field(
        None,
        ge=2,
        description="A prompt with its answer is cut at this many tokens; empty: at the model's "
        "limit.",
    )

    @field_validator("label_smoothing")
    @classmethod
    def _smooths_something(cls, share: float, info: ValidationInfo) -> float:
        if share and info.data.get("loss_type") != "robust":
            raise ValueError(
                "counts in TRL with loss_type: robust only; leave it out, or train with dpo"
            )
        return share


class LocalDPO(LocalAlgorithm):
    """Preferences on this machine, with TRL's DPOTrainer.

    The reference is the model as the run starts: the base model, or `model.init_from`.
    """

    name: ClassVar[str] = "local_dpo"
    Config: ClassVar[type[BaseAlgorithmConfig]] = LocalDPOConfig

    @classmethod
    def check_row(cls, row: Row, place: str) -> Problem | None:
        """A row needs a prompt, a chosen and a rejected answer."""
        return preference_problem(row, place)

    @classmethod
    def options_class(cls) -> type:
        """TRL's DPOConfig."""
        from trl import DPOConfig

        config: type = DPOConfig
        return config

    def prepare(self, ctx: RunContext) -> int:
        """Render both answers of every row, as dpo does."""
        self._rendering = render_pairs(ctx.dataset, ctx.tokenizer, self.cfg.max_seq_len)
        return len(self._rendering.pairs)

    def trainer(self, arguments: dict[str, Any]) -> RunsTrainer:
        """A DPOTrainer on the rendered pairs."""
        from datasets import Dataset
        from trl import DPOTrainer

        from algorithms.local.trainer import owned

        cfg: LocalDPOConfig = self.cfg
        extra = {
            "max_length": None,
            "loss_type": cfg.loss_type,
            "beta": cfg.beta,
            "label_smoothing": cfg.label_smoothing,
        }
        rows = [_row(pair) for pair in self._rendering.pairs]
        trainer: RunsTrainer = owned(_taking_tokens(DPOTrainer), "LocalDPO")(
            model=self.backend.model,
            args=self.options(arguments | extra),
            train_dataset=Dataset.from_list(rows),
            processing_class=self.context.tokenizer,
        )
        return trainer

    def metrics(self, step_idx: int, logs: Mapping[str, float]) -> dict[str, float]:
        """The columns that dpo has, before the step: means over the pairs."""
        pairs = [self._rendering.pairs[index] for index in self.step_rows(step_idx)]
        answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
        return {
            "loss": logs["loss"],
            "dpo/accuracy": logs["rewards/accuracies"],
            "dpo/margin": logs["rewards/margins"],
            "rewards/chosen": logs["rewards/chosen"],
            "rewards/rejected": logs["rewards/rejected"],
            "tokens/supervised": float(sum(int(answer.mask[1:].sum()) for answer in answers)),
            "tokens/total": float(sum(len(answer.tokens) - 1 for answer in answers)),
        }

    def setup_metrics(self) -> dict[str, float]:
        """Pairs and tokens of an epoch, and how many were cut, dropped, or skipped as bad."""
        done = self._rendering
        return {
            "data/rows": float(len(done.pairs)),
            "data/rows_cut": float(done.cut),
            "data/rows_dropped": float(done.dropped),
            "data/rows_skipped": float(done.skipped),
            "data/tokens": float(done.tokens_total),
        }


def _row(pair: Pair) -> dict[str, list[int]]:
    """The prompt's tokens and those of both answers, as TRL's collator takes them."""
    prompt, chosen = _split(pair.chosen)
    return {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": _split(pair.rejected)[1]}


def _split(answer: Rendered) -> tuple[list[int], list[int]]:
    """What comes before the supervised tokens, and from the first to the last of these."""
    places = answer.mask.nonzero()[0]
    first, last = int(places[0]), int(places[-1])
    tokens: list[int] = answer.tokens.tolist()
    return tokens[:first], tokens[first : last + 1]


def _taking_tokens(trainer: type) -> type:
    """The trainer on rows that are tokens already."""

    class TakingTokens(trainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
            return dataset

    return TakingTokens
