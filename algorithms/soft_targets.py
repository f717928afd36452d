"""What a teacher says of a student's own tokens, and the training examples it becomes.

Legend: P prompt tokens, T sampled tokens of an answer, K candidates a position, N = P + T - 1
positions of a datum. p is the student's distribution, q the teacher's; y_t is the token that was
sampled at t. Candidates are the teacher's K likeliest tokens; where it names fewer, the others have
the logprob -inf and weigh nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backends.base import ModelOutput, SamplingClient
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    import tinker
    import torch

    from backends.base import ForwardBackwardResult

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

SMALLEST_REST = 1e-6
"""The least probability of all tokens beyond the K: what sums of float32 leave can be negative."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """At each of T positions the teacher's likeliest tokens, `ids` and `logprobs` [T, K]."""

    ids: IntArray
    logprobs: FloatArray

    def weights(self) -> FloatArray:
        """The soft targets [T, K]: q over the candidates alone, exp(log q - logsumexp(log q))."""
        shifted = np.exp(self.logprobs - self.logprobs.max(axis=1, keepdims=True))
        weights: FloatArray = shifted / shifted.sum(axis=1, keepdims=True)
        return weights


@dataclass(frozen=True, slots=True, eq=False)
class Opinion:
    """Of an answer the teacher's logprob of each token [T], and its candidates if asked for.

    T is what fitted into the teacher's context: the answer, or the beginning of it.
    """

    logprobs: FloatArray
    candidates: Candidates | None


async def opinion(client: SamplingClient, prompt: list[int], answer: list[int], k: int) -> Opinion:
    """What a teacher that reads `prompt` thinks of an answer; `k` 0 asks for no candidates.

    Raises UserError if the server leaves a logprob out.
    """
    from tinker import types as tinker_types

    response = await client.sample(
        tinker_types.ModelInput.from_ints([*prompt, *answer]),
        1,
        tinker_types.SamplingParams(max_tokens=1, temperature=0.0),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=k,
    )
    given = (response.prompt_logprobs or [])[len(prompt) :]
    logprobs = np.asarray([np.nan if p is None else p for p in given], np.float64)
    if len(logprobs) != len(answer) or not np.isfinite(logprobs).all():
        raise _left_out(f"gave no logprob of some of an answer's {len(answer)} tokens")
    if not k:
        return Opinion(logprobs, None)
    tops = (response.topk_prompt_logprobs or [])[len(prompt) :]
    if len(tops) != len(answer) or not all(tops):
        raise _left_out(f"gave no likeliest tokens at some of an answer's {len(answer)} places")
    return Opinion(logprobs, _candidates([top or [] for top in tops], k))


def _left_out(what: str) -> UserError:
    return UserError(Problem("backend", what, "take a server that returns prompt logprobs"))


def _candidates(tops: list[list[tuple[int, float]]], k: int) -> Candidates:
    ids = np.zeros((len(tops), k), np.int64)
    logprobs = np.full((len(tops), k), -np.inf)
    for place, top in enumerate(tops):
        for rank, (token, logprob) in enumerate(top[:k]):
            ids[place, rank], logprobs[place, rank] = token, logprob
    return Candidates(ids, logprobs)


def entropy(weights_TK: FloatArray) -> FloatArray:
    """The entropy of each position's soft targets in nats, -sum_k w log w [T]; 0 log 0 is 0."""
    logs = np.log(weights_TK, out=np.zeros_like(weights_TK), where=weights_TK > 0)
    total: FloatArray = -(weights_TK * logs).sum(axis=1)
    return total


def soft_datum(
    prompt: list[int],
    answer: list[int],
    ids_TK: IntArray,
    weights_TK: FloatArray,
    counted: npt.NDArray[np.bool_],
) -> tinker.Datum:
    """An answer under soft targets: what the teacher would have said at each `counted` place [T].

    Inputs are the N tokens before each target. `target_tokens` and `weights` [N, K] hold the
    candidates and their weights in the rows P - 1 + t that predict the counted t; all else is zero.
    Candidates end where the teacher stopped reading, and no place beyond counts.
    """
    import tinker
    import torch

    whole = [*prompt, *answer]
    rows = torch.from_numpy(len(prompt) - 1 + np.flatnonzero(counted))
    chosen = counted[: len(ids_TK)]

    def placed(values: npt.NDArray[np.generic], dtype: torch.dtype) -> tinker.TensorData:
        dense = torch.zeros((len(whole) - 1, values.shape[1]), dtype=dtype)
        dense[rows] = torch.from_numpy(values[chosen]).to(dtype)
        return tinker.TensorData.from_torch_sparse(dense)

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(whole[:-1]),
        loss_fn_inputs={
            "target_tokens": placed(ids_TK, torch.int64),
            "weights": placed(weights_TK, torch.float32),
        },
    )


def reverse_kl(output: ModelOutput, data: list[tinker.Datum]) -> torch.Tensor:
    """KL(p || q) over the candidates and one bucket for all other tokens; a scalar, the sum.

    With p_k, q_k the probabilities of a counted position's candidates and P, Q their sums:

        sum_k p_k (log p_k - log q_k) + (1 - P) (log(1 - P) - log(1 - Q))

    q_k are the datum's `weights` as they are, not renormalised. The bucket makes it a true KL,
    never negative: probability that the student has beyond the candidates counts, too.
    Differentiable in p; 1 - P and 1 - Q are at least SMALLEST_REST. Source: on-policy distillation
    with the reverse KL, GKD (arXiv 2306.13649).
    """
    import torch

    total = torch.zeros((), dtype=torch.float64)
    for log_p, datum in zip(output.logprobs_per_datum, data, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_torch().double()
        counted = (weights > 0).any(dim=1)
        q, own = weights[counted], log_p[counted].double()
        named = q > 0
        log_q = torch.where(named, q, 1.0).log()
        p = torch.where(named, own.exp(), 0.0)
        rest_p, rest_q = ((1 - each.sum(dim=1)).clamp(min=SMALLEST_REST) for each in (p, q))
        among = torch.where(named, p * (own - log_q), 0.0).sum()
        total = total + among + (rest_p * (rest_p.log() - rest_q.log())).sum()
    return total


@dataclass(frozen=True, slots=True)
class SoftLoss:
    """Over a batch's counted positions: their number, the cross-entropy, the targets' entropy."""

    positions: int
    nll: float
    """Nats a position, -sum_k w_k log p_k."""
    entropy: float
    """Nats a position."""

    @property
    def forward_kl(self) -> float:
        """Nats a position: KL of the soft targets from p."""
        return self.nll - self.entropy


def soft_loss(data: list[tinker.Datum], fb_result: ForwardBackwardResult) -> SoftLoss:
    """What the forward pass says of soft targets, from the logprobs [N, K] of every datum.

    Each position's weights are brought to the sum 1.
    """
    positions, nll_sum, entropy_sum = 0, 0.0, 0.0
    for datum, output in zip(data, fb_result.loss_fn_outputs, strict=True):
        weights = datum.loss_fn_inputs["weights"].to_numpy().astype(np.float64)
        logprobs = output["logprobs"].to_numpy().astype(np.float64).reshape(weights.shape)
        counted = weights.any(axis=1)
        weights, logprobs = weights[counted], logprobs[counted]
        weights /= weights.sum(axis=1, keepdims=True)
        positions += len(weights)
        nll_sum -= float((weights * logprobs)[weights > 0].sum())
        entropy_sum += float(entropy(weights).sum())
    return SoftLoss(positions, nll_sum / positions, entropy_sum / positions)
