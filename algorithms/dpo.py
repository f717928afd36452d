"""Direct preference optimisation: make the better of two answers likelier than it was.

Legend: B pairs, N positions of one answer behind its prompt. p is the policy, q the reference (the
weights that the run starts from). The score s of an answer is log p - log q, summed over its
tokens; a pair's margin is its chosen answer's score less that of its rejected one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from algorithms.base import BaseAlgorithm, BaseAlgorithmConfig, RunContext, TrainingBatch
from algorithms.data.order import batch_rows, steps_per_epoch
from algorithms.data.pairs import Pair, pair_problem, render_pairs
from algorithms.data.rendering import Rendered, longest_scored, to_datum
from algorithms.data.shapes import Row
from algorithms.rollouts.likelihood import token_logprobs
from algorithms.teachers import open_start
from backends.base import Backend, ModelOutput
from backends.errors import Problem

if TYPE_CHECKING:
    import tinker
    from torch import Tensor

    from backends.base import ForwardBackwardResult

FloatArray = npt.NDArray[np.float32]

REFERENCE = "reference_logprobs"
"""The loss input [N] that holds log q of each target."""

LossType = Literal["sigmoid", "sigmoid_norm", "ipo", "robust"]


class PreferenceFields(BaseModel):
    """What direct preference optimisation can be told, whoever trains."""

    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of AdamW.")
    batch_size: int = Field(32, ge=1, description="Pairs in each optimizer step.")
    loss_type: LossType = Field(
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


class DPOConfig(PreferenceFields, BaseAlgorithmConfig):
    """What direct preference optimisation can be told."""

    @field_validator("label_smoothing")
    @classmethod
    def _smooths_something(cls, share: float, info: ValidationInfo) -> float:
        if share and info.data.get("loss_type") == "ipo":
            raise ValueError("says nothing to loss_type: ipo; leave it out")
        return share


class DPO(BaseAlgorithm):
    """Learn from preferences: pairs of a chosen and a rejected answer to one prompt.

    The reference is the model as the run starts: the base model, or `model.init_from`. It is asked
    for its logprobs of a batch while earlier steps train. The loss is the mean over the pairs.
    Source: Direct Preference Optimization, arXiv 2305.18290; see `pair_losses` for the variants.
    """

    name: ClassVar[str] = "dpo"
    Config: ClassVar[type[BaseAlgorithmConfig]] = DPOConfig

    @classmethod
    def check_row(cls, row: Row, place: str) -> Problem | None:
        """A row needs a prompt, a chosen and a rejected answer."""
        return pair_problem(row, place)

    async def setup(self, ctx: RunContext, backend: Backend) -> None:
        """Render both answers of every row, and open the reference."""
        cfg: DPOConfig = self.cfg
        self._rendering = await asyncio.to_thread(
            render_pairs, ctx.dataset, ctx.tokenizer, longest_scored(ctx.tokenizer, cfg.max_seq_len)
        )
        self._reference = await open_start(backend, ctx.config.model.init_from)
        self._seed = ctx.config.seed
        self._steps_per_epoch = steps_per_epoch(len(self._rendering.pairs), cfg.batch_size)
        self._keeps = self.total_steps > self._steps_per_epoch and not ctx.dataset.on_disk
        self._kept: dict[int, list[FloatArray]] = {}

    async def build_batch(self, step_idx: int) -> TrainingBatch:
        """The step's pairs, chosen and rejected in turn, each with the reference's logprobs."""
        cfg: DPOConfig = self.cfg
        pairs = self._rendering.pairs
        picked = batch_rows(len(pairs), cfg.batch_size, self._seed, step_idx)
        rendered = await asyncio.to_thread(lambda: {index: pairs[index] for index in picked})
        asked = [index for index in picked if index not in self._kept]
        known = await self._ask({index: rendered[index] for index in asked})
        if self._keeps:
            self._kept |= known
            known = {index: self._kept[index] for index in picked}
        data = [
            preference_datum(answer, logprobs)
            for index in picked
            for answer, logprobs in zip(_answers(rendered[index]), known[index], strict=True)
        ]
        loss = partial(
            dpo_loss,
            loss_type=cfg.loss_type,
            beta=cfg.beta,
            label_smoothing=cfg.label_smoothing,
        )
        return TrainingBatch(data, loss)

    async def _ask(self, pairs: Mapping[int, Pair]) -> dict[int, list[FloatArray]]:
        """What the reference makes of the two answers of each pair."""
        tokens = [answer.tokens for pair in pairs.values() for answer in _answers(pair)]
        logprobs = await token_logprobs(self._reference, tokens)
        targets = [each[1:].astype(np.float32) for each in logprobs]
        return {index: targets[2 * n : 2 * n + 2] for n, index in enumerate(pairs)}

    def step_metrics(
        self, step_idx: int, batch: TrainingBatch, fb_result: ForwardBackwardResult
    ) -> dict[str, float]:
        """Before the step: the loss, and rewards beta * s as TRL logs them, means over the pairs.

        `dpo/accuracy` is the share of pairs whose chosen answer has the higher reward, `dpo/margin`
        how much higher it is.
        """
        outputs = [output["logprobs"].to_torch() for output in fb_result.loss_fn_outputs]
        scores = pair_scores(outputs, batch.data)
        chosen, rejected = (self.cfg.beta * s.numpy() for s in (scores.chosen, scores.rejected))
        return {
            "loss": fb_result.metrics["loss:sum"],
            "dpo/accuracy": float((chosen > rejected).mean()),
            "dpo/margin": float((chosen - rejected).mean()),
            "rewards/chosen": float(chosen.mean()),
            "rewards/rejected": float(rejected.mean()),
            "tokens/supervised": float(scores.chosen_tokens.sum() + scores.rejected_tokens.sum()),
            "tokens/total": float(sum(datum.model_input.length for datum in batch.data)),
        }

    def setup_metrics(self) -> dict[str, float]:
        """Pairs and tokens of an epoch, and what became of the other rows."""
        return self._rendering.metrics()


def _answers(pair: Pair) -> tuple[Rendered, Rendered]:
    return pair.chosen, pair.rejected


def preference_datum(answer: Rendered, reference: FloatArray) -> tinker.Datum:
    """An answer with its prompt: inputs, targets, weights [N], and the reference's logprobs [N]."""
    import tinker

    datum = to_datum(answer)
    logprobs = tinker.TensorData.from_numpy(reference)
    return tinker.Datum(
        model_input=datum.model_input,
        loss_fn_inputs={**datum.loss_fn_inputs, REFERENCE: logprobs},
    )


# --- the loss -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PairScores:
    """Of B pairs: the scores of both answers, and how many tokens these have, all [B] float64."""

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor


def pair_scores(logprobs: Sequence[Tensor], data: Sequence[tinker.Datum]) -> PairScores:
    """Scores from the policy's logprobs [N] of chosen and rejected answers in turn.

    Tokens of weight 0 do not count. Differentiable in the logprobs.
    """
    import torch

    scores, counts = [], []
    for policy, datum in zip(logprobs, data, strict=True):
        counted = datum.loss_fn_inputs["weights"].to_torch() > 0
        reference = datum.loss_fn_inputs[REFERENCE].to_torch()
        scores.append((policy.double() - reference.double())[counted].sum())
        counts.append(counted.sum().double())
    s, n = torch.stack(scores), torch.stack(counts)
    return PairScores(s[::2], s[1::2], n[::2], n[1::2])


def dpo_loss(
    output: ModelOutput,
    data: list[tinker.Datum],
    *,
    loss_type: LossType,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """The mean of `pair_losses` over the batch, a scalar; data are chosen and rejected in turn."""
    scores = pair_scores(output.logprobs_per_datum, data)
    return pair_losses(scores, loss_type, beta, label_smoothing).mean()


def pair_losses(
    scores: PairScores, loss_type: LossType, beta: float, label_smoothing: float
) -> Tensor:
    """The loss of each pair [B], from its margin m = s(chosen) - s(rejected), smoothed by e.

        sigmoid       -(1 - e) log sigmoid(beta m) - e log sigmoid(-beta m)
        sigmoid_norm  the same, with the mean over an answer's tokens in place of its sum
        robust        (-(1 - e) log sigmoid(beta m) + e log sigmoid(-beta m)) / (1 - 2 e)
        ipo           (m - 1 / (2 beta))^2, with means over tokens

    Source: DPO, arXiv 2305.18290, and its note on conservative DPO; robust DPO, arXiv 2403.00409;
    IPO, arXiv 2310.12036, whose authors take means, as TRL says.
    """
    chosen, rejected = scores.chosen, scores.rejected
    if loss_type in ("ipo", "sigmoid_norm"):
        chosen, rejected = chosen / scores.chosen_tokens, rejected / scores.rejected_tokens
    return LOSS_TYPES[loss_type](chosen - rejected, beta, label_smoothing)


def _sigmoid(margins: Tensor, beta: float, label_smoothing: float) -> Tensor:
    from torch.nn.functional import logsigmoid

    right, wrong = logsigmoid(beta * margins), logsigmoid(-beta * margins)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def _robust(margins: Tensor, beta: float, label_smoothing: float) -> Tensor:
    from torch.nn.functional import logsigmoid

    right, wrong = logsigmoid(beta * margins), logsigmoid(-beta * margins)
    smoothed = -(1 - label_smoothing) * right + label_smoothing * wrong
    return smoothed / (1 - 2 * label_smoothing)


def _ipo(margins: Tensor, beta: float, label_smoothing: float) -> Tensor:
    return (margins - 1 / (2 * beta)).square()


LOSS_TYPES: Mapping[LossType, Callable[[Tensor, float, float], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
    "ipo": _ipo,
    "robust": _robust,
}
