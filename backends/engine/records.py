"""What passes between the engine's HTTP side and its compute side: one frozen record an example.

Arrays are packed numpy, taken from the wire without a detour over Python lists. Shapes use
N = positions of one datum, K = target candidates a position, T = sampled tokens, P = prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Which adapter a model gets. `seed` None draws a fresh one; alpha is fixed by the engine."""

    rank: int
    seed: int | None = None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class AdamParams:
    """One optimizer step's settings, as in torch.optim.AdamW; clip norm 0 means no clipping."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True)
class Datum:
    """One example: `tokens` [N] go in; `loss_inputs` hold target_tokens, weights, … [N] or [N, K].

    Sparse tensors are dense here. Names and shapes are checked against the loss registry.
    """

    tokens: IntArray
    loss_inputs: Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class PassRequest:
    """A forward or forward_backward over `data`, under one loss, on one model at one version."""

    request_id: str
    model_id: str
    version: int
    data: tuple[Datum, ...]
    loss_fn: str
    loss_config: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PassOutput:
    """Per datum the loss's outputs (`logprobs` [N] or [N, K]); metrics named `name:reduction`."""

    outputs: tuple[Mapping[str, FloatArray], ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class OptimStepOutput:
    """The version after the step, and metrics (`grad_norm`: global L2 norm before clipping)."""

    version: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. top_k -1 and top_p 1 are off; temperature 0 is greedy.

    The stop token, or the token that completes a stop string, is part of the sample. None for both
    stops means the model's own end-of-sequence tokens; an empty `stop_tokens` samples past them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop_strings: tuple[str, ...] | None = None
    stop_tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """`num_samples` continuations of `prompt` [P] from sampler weights (None: the base model).

    Asked for beside them: the prompt's own logprobs, the likeliest tokens at each position of the
    prompt and of the samples, the logprobs of `target_prompt_tokens` [P - 1, K] (-1: of none) after
    each prompt token but the last, and so many tokens drawn there at the request's temperature.
    """

    request_id: str
    sampler_id: str | None
    prompt: IntArray
    num_samples: int
    params: SamplingParams
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_prompt_tokens: IntArray | None = None
    prompt_alt_tokens_k: int = 0


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """`tokens` [T] with the `logprobs` [T] they had under the model at temperature 1.

    `topk_tokens` and `topk_logprobs` [T, k] are the likeliest at each position, if asked for.
    """

    tokens: IntArray
    logprobs: FloatArray
    stop_reason: Literal["stop", "length"]
    topk_tokens: IntArray | None = None
    topk_logprobs: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Sequences in order; `prompt_logprobs` [P] starts with NaN; top-k ids and logprobs [P, k].

    The first row of the top-k is undefined: ids 0, logprobs NaN. `target_prompt_logprobs`
    [P - 1, K] is 0 where the request named no token; the alternatives are [P - 1, k].
    """

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: FloatArray | None = None
    topk_prompt_tokens: IntArray | None = None
    topk_prompt_logprobs: FloatArray | None = None
    target_prompt_logprobs: FloatArray | None = None
    prompt_alt_tokens: IntArray | None = None
    prompt_alt_logprobs: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why one request of a batch failed; `user` if its sender can mend it."""

    message: str
    category: Literal["user", "server"] = "user"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a compute backend can do, as told to clients before they ask for it."""

    base_model: str
    max_context_length: int
    vocab_size: int
    losses: tuple[str, ...]
    max_lora_rank: int
    device: str
    dtype: str
