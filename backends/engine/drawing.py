"""Drawing tokens from logits, and knowing where a sequence stops.

Each sample draws from a random stream of its own, one number a token, by the inverse of the
cumulative distribution. Every operation here works row by row, so that a row's token and logprob
are the same bits whatever the other rows are.

Shapes: B rows, V vocabulary, k tokens drawn or asked for a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backends.engine.records import FloatArray, IntArray, SamplingParams
from backends.engine.torch_model import FrozenModel

NoiseArray = npt.NDArray[np.float64]

NO_TOP_K = np.iinfo(np.int64).max
"""As `top_k`: no limit."""
_COLDEST = 1e-30
"""Temperatures below are taken as this, which draws the likeliest token too."""
_LIKELIEST = 1024
"""How many tokens are sorted first for top-k and top-p; seldom are more needed."""
_ALTERNATIVES = 2**32 - 1
"""The random stream of a request's alternatives to its prompt; samples have those from 0 on."""


def entropy_of(params: SamplingParams) -> int:
    """What a request's random streams start from: its seed, or fresh entropy."""
    if params.seed is not None:
        return params.seed % 2**64
    fresh = np.random.SeedSequence().entropy
    assert isinstance(fresh, int)
    return fresh


def noise_stream(entropy: int, index: int = _ALTERNATIVES) -> np.random.Generator:
    """The random stream of a request's sample of this index, or that of its alternatives."""
    seed = np.random.SeedSequence(entropy, spawn_key=(index,))
    return np.random.Generator(np.random.PCG64(seed))


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens [B], logprobs [B] at temperature 1 without top-k or top-p, and all logprobs [B, V]."""

    tokens: Tensor
    logprobs: Tensor
    shifted: Tensor
    log_total: Tensor

    def top(self, rows: Sequence[int], k: int) -> tuple[IntArray, FloatArray]:
        """The k likeliest tokens of these rows and their logprobs, both [rows, k]."""
        some = torch.tensor(rows, device=self.shifted.device)
        top = self.shifted.index_select(0, some).topk(k)
        logprobs = top.values - self.log_total.index_select(0, some)
        return top.indices.cpu().numpy(), logprobs.cpu().numpy()


class Draw:
    """The settings of rows side by side, and how their next tokens are drawn.

    `temperature` 0 is greedy, `top_k` NO_TOP_K and `top_p` 1 are off; all are [B].
    """

    def __init__(
        self, temperature: FloatArray, top_k: IntArray, top_p: FloatArray, device: torch.device
    ) -> None:
        greedy = temperature == 0
        self._random = not greedy.all()
        self._greedy = torch.from_numpy(greedy).to(device)[:, None] if greedy.any() else None
        self._temperature: Tensor | None = None
        if ((temperature != 1) & ~greedy).any():
            divisors = np.where(greedy, 1, np.maximum(temperature, _COLDEST)).astype(np.float32)
            self._temperature = torch.from_numpy(divisors).to(device)[:, None]
        cut = np.flatnonzero(~greedy & ((top_k < NO_TOP_K) | (top_p < 1)))
        self._cut = torch.from_numpy(cut).to(device) if cut.size else None
        self._top_k = torch.from_numpy(top_k[cut]).to(device)[:, None]
        limits = np.where(top_p[cut] < 1, top_p[cut], np.inf)
        self._top_p = torch.from_numpy(limits.astype(np.float32)).to(device)[:, None]

    def __call__(self, logits: Tensor, noise: NoiseArray) -> Drawn:
        """Draw with one number in [0, 1) a row. The logits [B, V] are used up."""
        shifted, total, best = _weigh(logits)
        tokens = best
        if self._random:
            weights = total.weights
            if self._temperature is not None:
                weights = (shifted / self._temperature).exp_()
            if self._cut is not None:
                some = weights.index_select(0, self._cut)
                some = _cut_off(some, self._top_k, self._top_p, min(_LIKELIEST, some.shape[-1]))
                weights = weights.index_copy(0, self._cut, some)
            tokens = _inverse_cdf(weights, noise[:, None])
            if self._greedy is not None:
                tokens = torch.where(self._greedy, best, tokens)
        logprobs = shifted.gather(-1, tokens) - total.log
        return Drawn(tokens[:, 0], logprobs[:, 0], shifted, total.log)


def draw_alternatives(
    logits: Tensor, temperature: float, noise: NoiseArray
) -> tuple[IntArray, FloatArray]:
    """For each number of `noise` [B, k] a token, and its logprob at temperature 1, [B, k] each.

    The logits [B, V] are used up.
    """
    shifted, total, best = _weigh(logits)
    tokens = best.expand(noise.shape)
    if temperature > 0:
        tokens = _inverse_cdf((shifted / max(temperature, _COLDEST)).exp_(), noise)
    logprobs = shifted.gather(-1, tokens) - total.log
    return tokens.cpu().numpy(), logprobs.cpu().numpy()


@dataclass(frozen=True, slots=True)
class _Total:
    """exp(logits - highest) [B, V], and the log of its sum [B, 1]."""

    weights: Tensor
    log: Tensor


def _weigh(logits: Tensor) -> tuple[Tensor, _Total, Tensor]:
    """Logits less the highest (in their place), their total, and the likeliest token [B, 1]."""
    highest, best = logits.max(-1, keepdim=True)
    shifted = logits.sub_(highest)
    weights = shifted.exp()
    return shifted, _Total(weights, weights.sum(-1, keepdim=True).log_()), best


def _cut_off(weights: Tensor, top_k: Tensor, top_p: Tensor, most: int) -> Tensor:
    """Zero what top_k [B, 1], then top_p [B, 1] leave out of the weights [B, V].

    Only the `most` highest are sorted; rows for which that is not enough are sorted as a whole.
    """
    values, order = weights.topk(most)
    cumulative = _wide(values).cumsum(-1)
    whole = _wide(weights).cumsum(-1)[:, -1:]
    by_k = cumulative.gather(-1, top_k.clamp(max=most) - 1)
    enough = top_p * torch.where(top_k <= most, by_k, whole)
    ranks = torch.arange(most, device=weights.device)
    values[(ranks >= top_k) | (cumulative - values >= enough)] = 0
    kept = torch.zeros_like(weights).scatter_(-1, order, values)
    short = ((top_k > most) & (cumulative[:, -1:] < enough))[:, 0]
    if most < weights.shape[-1] and short.any():
        kept[short] = _cut_off(weights[short], top_k[short], top_p[short], weights.shape[-1])
    return kept


def _inverse_cdf(weights: Tensor, noise: NoiseArray) -> Tensor:
    """The tokens [B, k] at which each row's cumulative weight passes its numbers in [0, 1)."""
    cumulative = _wide(weights).cumsum(-1)
    points = torch.from_numpy(noise).to(weights.device, cumulative.dtype) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, points, right=True)
    return drawn.clamp_(max=weights.shape[-1] - 1)


def _wide(weights: Tensor) -> Tensor:
    return weights.to(torch.float32 if weights.device.type == "mps" else torch.float64)


class StopRule:
    """When a sequence ends: at one of some tokens, or once its text holds one of some strings."""

    def __init__(self, params: SamplingParams, base: FrozenModel) -> None:
        self._base = base
        self.strings = params.stop_strings or ()
        tokens = frozenset(params.stop_tokens or ())
        if params.stop_strings is None and params.stop_tokens is None:
            tokens = base.end_tokens
        self.tokens = np.array(sorted(tokens), np.int64)
        self._ends = frozenset(string[-1] for string in self.strings)
        # A token adds at least a byte of text, bar a few that only mark something.
        self.window = 8 + max((len(string.encode()) for string in self.strings), default=0)

    def completed_by(self, tokens: Sequence[int]) -> bool:
        """Whether the last of the sampled tokens completes a stop string.

        It is enough to give the last `window` tokens.
        """
        if not self._may_complete(tokens[-1]):
            return False
        text = self._base.text(tuple(tokens[-self.window :]))
        return any(string in text for string in self.strings)

    def _may_complete(self, token: int) -> bool:
        """False if the token lacks the strings' last characters, which saves decoding the tail.

        Spaces and parts of characters do not show in the text of a token by itself.
        """
        piece = self._base.piece(token)
        return " " in self._ends or "\ufffd" in piece or not self._ends.isdisjoint(piece)
