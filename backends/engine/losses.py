"""The sole list of losses: name, inputs, config keys with defaults and ranges, formula.

Importable without torch, so that the HTTP side can name and check losses; the formulas use tensor
methods only. Every loss is a token SUM over all positions and datums, without normalisation, as
documented for the Tinker service. To add one, write its formula and append a row to `LOSSES`.

Legend: p = logprobs of the targets under the model, q = the `logprobs` given (the sampler's),
A = `advantages`, w = `weights`, r = exp(p - q). Shapes: N positions of one datum, K target
candidates a position, M = positions of several datums, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from backends.engine.records import Datum

if TYPE_CHECKING:
    from torch import Tensor

Formula = Callable[["Tensor", Mapping[str, "Tensor"], Mapping[str, float]], "Tensor"]

TARGETS = "target_tokens"
MAX_FLOAT32 = float(np.finfo(np.float32).max)
MAX_LOG_RATIO = 40.0
"""p - q saturates here, with zero gradient beyond: squared gradients still fit float32."""


def cross_entropy(p: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-sum w * p, with p and w [M] or [M, K] (soft targets); returns a scalar, the sum.

    Weights may be negative or fractional. Source: Tinker documentation, "Loss functions".
    """
    return -(inputs["weights"] * p).sum()


def importance_sampling(
    p: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]
) -> Tensor:
    """-sum r * A, with p, q and A [M]; returns a scalar, the sum. Source: Tinker documentation."""
    return -(_ratio(p, inputs) * inputs["advantages"]).sum()


def ppo(p: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-sum min(r * A, clip(r, low, high) * A), with p, q and A [M]; returns a scalar, the sum.

    The thresholds are absolute bounds on r. Source: Tinker documentation; PPO, arXiv 1707.06347.
    """
    ratio, advantages = _ratio(p, inputs), inputs["advantages"]
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -(ratio * advantages).minimum(clipped * advantages).sum()


def cispo(p: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-sum sg(clip(r, low, high)) * p * A, with p, q and A [M]; returns a scalar, the sum.

    sg stops the gradient. Source: Tinker documentation; MiniMax-M1, arXiv 2506.13585.
    """
    ratio = _ratio(p.detach(), inputs)
    clipped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    return -(clipped * p * inputs["advantages"]).sum()


def dro(p: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """-sum [p * A - beta / 2 * (p - q)^2], with p, q and A [M]; returns a scalar, the sum.

    Source: Tinker documentation; DRO, arXiv 2405.19107.
    """
    penalty = 0.5 * config["beta"] * (p - inputs["logprobs"]).square()
    return -(p * inputs["advantages"] - penalty).sum()


def _ratio(p: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    return (p - inputs["logprobs"]).clamp(max=MAX_LOG_RATIO).exp()


@dataclass(frozen=True, slots=True)
class LossInput:
    """A float array beside the targets, of their shape; `default` fills it in where absent."""

    name: str
    default: float | None = None

    @property
    def required(self) -> bool:
        """Whether a datum has to bring it."""
        return self.default is None


@dataclass(frozen=True, slots=True)
class LossOption:
    """A config key; its value lies in [low, high] and not below that of `not_below`, if named.

    The formulas compute in float32, which cannot hold more than the default of `high`.
    """

    name: str
    default: float
    low: float = 0.0
    high: float = MAX_FLOAT32
    not_below: str | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """One row. Where input `silent_at_zero` is 0, a position adds no loss and no gradient."""

    name: str
    formula: Formula
    inputs: tuple[LossInput, ...]
    options: tuple[LossOption, ...] = ()
    soft_targets: bool = False
    silent_at_zero: str | None = None

    def settings(self, config: Mapping[str, float]) -> dict[str, float]:
        """Every option's value: the one given, else its default."""
        return {
            option.name: float(config.get(option.name, option.default)) for option in self.options
        }


_OFF_POLICY = (LossInput("logprobs"), LossInput("advantages"))


def _clip_options(low: float, high: float) -> tuple[LossOption, ...]:
    return (
        LossOption("clip_low_threshold", default=low),
        LossOption("clip_high_threshold", default=high, not_below="clip_low_threshold"),
    )


LOSSES: Mapping[str, Loss] = {
    row.name: row
    for row in (
        Loss(
            "cross_entropy",
            cross_entropy,
            (LossInput("weights", default=1.0),),
            soft_targets=True,
            silent_at_zero="weights",
        ),
        Loss("importance_sampling", importance_sampling, _OFF_POLICY, silent_at_zero="advantages"),
        Loss("ppo", ppo, _OFF_POLICY, _clip_options(0.8, 1.2), silent_at_zero="advantages"),
        Loss("cispo", cispo, _OFF_POLICY, _clip_options(0.0, 4.0), silent_at_zero="advantages"),
        Loss("dro", dro, _OFF_POLICY, (LossOption("beta", default=0.05),)),
    )
}


def check_request(
    loss_fn: str,
    data: Sequence[Datum],
    config: Mapping[str, object] | None = None,
    *,
    vocab_size: int,
    max_length: int,
) -> str | None:
    """The first mistake in a whole request, as `where: what is wrong; what to do`, or None."""
    if problem := check_config(loss_fn, config or {}):
        return problem
    if not data:
        return "data: holds no datum; send at least one"
    for index, datum in enumerate(data):
        if problem := check_datum(
            loss_fn, datum, index=index, vocab_size=vocab_size, max_length=max_length
        ):
            return problem
    return None


def check_config(loss_fn: str, config: Mapping[str, object]) -> str | None:
    """A mistake in the loss's name or its config, or None."""
    loss = LOSSES.get(loss_fn)
    if loss is None:
        return f"loss_fn: there is no loss {loss_fn[:80]!r}; use one of {', '.join(LOSSES)}"
    known = {option.name: option for option in loss.options}
    for key, value in config.items():
        where = f"loss_fn_config.{key[:80]}"
        if key not in known:
            keys = f"use one of {', '.join(known)}" if known else "leave the config empty"
            return f"{where}: {loss_fn} has no such key; {keys}"
        option = known[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{where}: is {repr(value)[:80]}, which is not a number; give a number"
        if not option.low <= value <= option.high:
            return f"{where}: is {value}; give a number from {option.low:g} to {option.high:g}"
    return _check_order(loss, {key: float(value) for key, value in config.items()})  # type: ignore[arg-type]


def _check_order(loss: Loss, config: Mapping[str, float]) -> str | None:
    settings = loss.settings(config)
    for option in loss.options:
        if option.not_below and settings[option.name] < settings[option.not_below]:
            return (
                f"loss_fn_config.{option.name}: {settings[option.name]:g} is below "
                f"{option.not_below} {settings[option.not_below]:g}; raise it or lower the other"
            )
    return None


def check_datum(
    loss_fn: str, datum: Datum, *, index: int, vocab_size: int, max_length: int
) -> str | None:
    """A mistake in `data[index]` under a known loss, naming datum, field and remedy, or None."""
    here = f"data[{index}]"
    if problem := _check_tokens(
        datum.tokens, f"{here}.model_input", vocab_size=vocab_size, max_length=max_length
    ):
        return problem
    loss = LOSSES[loss_fn]
    known = (TARGETS, *(row.name for row in loss.inputs))
    for name in datum.loss_inputs:
        if name not in known:
            return (
                f"{here}.loss_fn_inputs.{name[:80]}: {loss_fn} takes no such input; "
                f"leave it out (it takes {', '.join(known)})"
            )
    for name in (TARGETS, *(row.name for row in loss.inputs if row.required)):
        if name not in datum.loss_inputs:
            return f"{here}.loss_fn_inputs.{name}: is missing; {loss_fn} needs it"
    if problem := _check_targets(loss, datum, here, vocab_size):
        return problem
    shape = datum.loss_inputs[TARGETS].shape
    for row in loss.inputs:
        array = datum.loss_inputs.get(row.name)
        if array is not None and (problem := _check_floats(array, shape)):
            return f"{here}.loss_fn_inputs.{row.name}: {problem}"
    return None


def _check_tokens(
    tokens: npt.NDArray[np.generic], where: str, *, vocab_size: int, max_length: int
) -> str | None:
    if tokens.ndim != 1 or tokens.size == 0:
        return f"{where}: holds no tokens; leave the datum out or give it at least one token"
    if tokens.size > max_length:
        return (
            f"{where}: has {tokens.size} tokens but the context holds {max_length}; "
            "shorten or split it"
        )
    return _check_ids(tokens, where, vocab_size)


def _check_ids(ids: npt.NDArray[np.generic], where: str, vocab_size: int) -> str | None:
    if ids.dtype.kind not in "iu":
        return f"{where}: holds {ids.dtype} values; token ids are integers"
    if int(ids.min()) >= 0 and int(ids.max()) < vocab_size:
        return None
    at = int(np.flatnonzero((ids < 0) | (ids >= vocab_size))[0])  # type: ignore[operator]
    return (
        f"{where}: token id {ids.flat[at]} at position {np.unravel_index(at, ids.shape)[0]} is "
        f"outside the vocabulary of {vocab_size}; encode with this model's tokenizer"
    )


def _check_targets(loss: Loss, datum: Datum, here: str, vocab_size: int) -> str | None:
    targets = datum.loss_inputs[TARGETS]
    where = f"{here}.loss_fn_inputs.{TARGETS}"
    allowed = (1, 2) if loss.soft_targets else (1,)
    if targets.ndim not in allowed or targets.size == 0:
        dims = "[N] or [N, K]" if loss.soft_targets else "[N]"
        return f"{where}: has shape {list(targets.shape)}; {loss.name} takes {dims}"
    if targets.shape[0] != datum.tokens.size:
        return (
            f"{where}: has {targets.shape[0]} positions but model_input has {datum.tokens.size} "
            "tokens; give one target for each token"
        )
    if targets.ndim == 2 and targets.shape[1] > vocab_size:
        return (
            f"{where}: has {targets.shape[1]} candidates a position, more than the {vocab_size} "
            "tokens of the vocabulary; name each at most once"
        )
    return _check_ids(targets, where, vocab_size)


def _check_floats(array: npt.NDArray[np.generic], shape: tuple[int, ...]) -> str | None:
    if array.dtype.kind not in "fiub":
        return f"holds {array.dtype} values; give numbers"
    if array.shape != shape:
        return (
            f"has shape {list(array.shape)} but {TARGETS} has {list(shape)}; "
            "give one value for each target"
        )
    with np.errstate(over="ignore"):
        finite = np.isfinite(array.astype(np.float32, copy=False))
    if finite.all():
        return None
    at = int(np.flatnonzero(~finite)[0])
    return f"value {at} is {array.flat[at]}, which is not finite in float32; mend or leave it out"
