"""How likely fixed weights find tokens that somebody else drew."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from algorithms.rollouts.runner import together
from backends.base import SamplingClient
from backends.errors import Problem, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence


async def token_logprobs(
    client: SamplingClient, sequences: Sequence[npt.NDArray[np.int64]]
) -> list[npt.NDArray[np.float64]]:
    """The logprob of each token behind those before it; per sequence [N + 1], the first is 0.

    Raises UserError if the server leaves one out.
    """
    return await together(_token_logprobs(client, tokens) for tokens in sequences)


async def _token_logprobs(
    client: SamplingClient, tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    from tinker import types as tinker_types

    answer = await client.sample(
        tinker_types.ModelInput.from_ints(tokens.tolist()),
        1,
        tinker_types.SamplingParams(max_tokens=1, temperature=0.0),
        include_prompt_logprobs=True,
    )
    given = [np.nan if p is None else p for p in answer.prompt_logprobs or []]
    logprobs = np.asarray([0.0, *given[1:]], np.float64)
    if len(logprobs) != len(tokens) or not np.isfinite(logprobs).all():
        what = f"gave no logprob of some of a prompt's {len(tokens)} tokens"
        remedy = "take a server that returns prompt logprobs"
        raise UserError(Problem("backend", what, remedy))
    return logprobs
