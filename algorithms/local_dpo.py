"""Direct preference optimisation with TRL's DPOTrainer, in this process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationInfo, field_validator

from algorithms.base import BaseAlgorithmConfig, RunContext
from algorithms.data.pairs import pair_problem, render_pairs
from algorithms.data.shapes import Row
from algorithms.dpo import PreferenceFields
from algorithms.local.algorithm import LocalAlgorithm
from algorithms.local.options import LocalConfig, Refusals
from backends.errors import Problem

if TYPE_CHECKING:
    from algorithms.data.pairs import Pair
    from algorithms.local.trainer import RunsTrainer


class LocalDPOConfig(PreferenceFields, LocalConfig):
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
        return pair_problem(row, place)

    @classmethod
    def options_class(cls) -> type:
        """TRL's DPOConfig."""
        from trl import DPOConfig

        config: type = DPOConfig
        return config

    def prepare(self, ctx: RunContext) -> int:
        """Render both answers of every row, as dpo does."""
        self._rendering = render_pairs(
            ctx.dataset, ctx.tokenizer, self.longest_row(self.cfg.max_seq_len)
        )
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
        trainer.data_collator = _Masking(trainer.data_collator)
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
        return self._rendering.metrics()


def _row(pair: Pair) -> dict[str, list[Any]]:
    """Both answers as TRL's collator takes them, each with its prompt, and which tokens count."""
    row: dict[str, list[Any]] = {"prompt_ids": []}
    for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
        row |= {f"{name}_ids": answer.tokens.tolist(), f"{name}_mask": answer.mask.tolist()}
    return row


@dataclass(frozen=True)
class _Masking:
    """TRL's collator, with the masks of the rows: an answer may hold turns that do not count."""

    collate: Any

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch, chosen answers first: token ids and masks [2 B, N]."""
        import torch

        batch: dict[str, Any] = self.collate(rows)
        masks = [row[f"{name}_mask"] for name in ("chosen", "rejected") for row in rows]
        batch["completion_mask"] = torch.zeros_like(batch["completion_mask"])
        for line, mask in zip(batch["completion_mask"], masks, strict=True):
            line[: len(mask)] = torch.tensor(mask)
        return batch


def _taking_tokens(trainer: type) -> type:
    """The trainer on rows that are tokens already."""

    class TakingTokens(trainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
            return dataset

    return TakingTokens
