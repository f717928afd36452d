"""What was sampled, and how it becomes training examples: the tokens as they were drawn.

Shapes: P tokens of a prompt, T sampled tokens of a turn; a segment of N + 1 tokens is a datum of N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from algorithms.data.shapes import Message
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    import tinker
    from tinker import types as tinker_types


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampled turn: the `prompt` [P] it answers, its `tokens` [T], their `logprobs` [T].

    The logprobs are the sampler's own. `cut` says that it was cut off at max_tokens.
    """

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    cut: bool


@dataclass(frozen=True, slots=True)
class Rollout:
    """A conversation that is over; `end` says why: stop, length, or max_turns."""

    group: int
    turns: Sequence[Turn]
    messages: list[Message]
    reward: float
    end: str
    metrics: Mapping[str, float]
    retries: int


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """`tokens` [N + 1] that the model reads in one go, `mask` [N + 1] true where it sampled them.

    `logprobs` [N + 1] are the sampler's, 0 where the mask is false.
    """

    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float64]


def sampled_turn(prompt: list[int], sequence: tinker_types.SampledSequence) -> Turn:
    """A sampler's answer to a prompt. Raises UserError if a logprob is missing or not finite."""
    tokens, logprobs = list(sequence.tokens), sequence.logprobs
    if logprobs is None or len(logprobs) != len(tokens):
        what = f"gave {len(logprobs or [])} logprobs for {len(tokens)} sampled tokens"
    elif not np.isfinite(logprobs).all():
        at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
        what = f"gave {logprobs[at]} as the logprob of sampled token {at}"
    else:
        return Turn(prompt, tokens, list(logprobs), sequence.stop_reason == "length")
    raise UserError(
        Problem("backend", what, "take a server that returns the logprobs of what it samples")
    )


def segments(turns: Sequence[Turn]) -> list[Segment]:
    """The turns of a rollout, merged as long as each one's prompt begins with all before it."""
    merged: list[tuple[list[int], list[bool], list[float]]] = []
    for turn in turns:
        if not merged or turn.prompt[: len(merged[-1][0])] != merged[-1][0]:
            merged.append(([], [], []))
        tokens, mask, logprobs = merged[-1]
        between = turn.prompt[len(tokens) :]
        tokens += between + turn.tokens
        mask += [False] * len(between) + [True] * len(turn.tokens)
        logprobs += [0.0] * len(between) + turn.logprobs
    return [
        Segment(np.asarray(tokens, np.int64), np.asarray(mask), np.asarray(logprobs))
        for tokens, mask, logprobs in merged
    ]


def to_datum(segment: Segment, advantages: npt.NDArray[np.float64]) -> tinker.Datum:
    """The segment under a policy-gradient loss; `advantages` [N + 1] are 0 where it is not sampled.

    Inputs [N], targets one further [N], with the logprob and the advantage of each target [N].
    """
    import tinker

    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(segment.tokens[:-1].tolist()),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData.from_numpy(segment.tokens[1:]),
            "logprobs": tinker.TensorData.from_numpy(segment.logprobs[1:].astype(np.float32)),
            "advantages": tinker.TensorData.from_numpy(advantages[1:].astype(np.float32)),
        },
    )
