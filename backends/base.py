"""The one protocol between a run and its compute, and how a kind of backend is opened.

`Backend` is the contract of the documents this project implements: every method submits its request
when it is **called** and returns an awaitable of the result, so that a caller can queue the
optimizer step behind the forward-backward before it awaits either. Data and results are the tinker
SDK's own types; nothing here imports torch or the SDK at run time.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict

from backends.errors import Problem

if TYPE_CHECKING:
    import tinker
    import torch
    from tinker import types as tinker_types

    ForwardBackwardResult = tinker_types.ForwardBackwardOutput
    OptimStepResult = tinker_types.OptimStepResponse

Tokenizer = Any
"""A Hugging Face tokenizer (`PreTrainedTokenizerBase`); transformers ships no types for it."""


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """What a custom loss sees of one batch: per datum the `logprobs` [N] of its target tokens.

    The tensors require grad; the gradient of the loss with respect to them is sent to the server.
    """

    logprobs_per_datum: list[torch.Tensor]

    @property
    def logprobs(self) -> torch.Tensor:
        """All target logprobs of the batch, one datum after the other, [sum of N]."""
        import torch

        return torch.cat(self.logprobs_per_datum)


LossCallable = Callable[[ModelOutput, "list[tinker.Datum]"], "torch.Tensor"]
"""A client-side loss: `(model_output, data) -> scalar tensor`."""


class SamplingClient(Protocol):
    """Draws from fixed weights; the tinker SDK's own client satisfies this."""

    def sample(
        self,
        prompt: tinker_types.ModelInput,
        num_samples: int,
        sampling_params: tinker_types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[tinker_types.SampleResponse]:
        """Submit a sampling request; await the result for `num_samples` sequences.

        With `include_prompt_logprobs` the answer's `prompt_logprobs` [len(prompt)] score the prompt
        itself (the first has none), with `topk_prompt_logprobs` the likeliest tokens at each place.
        """
        ...


class Backend(Protocol):
    """The live training client of one run."""

    def forward_backward_async(
        self,
        data: list[tinker.Datum],
        *,
        loss_fn: str,
        loss_fn_config: dict[str, float] | None = None,
    ) -> Awaitable[ForwardBackwardResult]:
        """Submit a forward and backward pass under a server-side loss."""
        ...

    def forward_backward_custom_async(
        self, data: list[tinker.Datum], loss_fn: LossCallable
    ) -> Awaitable[ForwardBackwardResult]:
        """The same under a Python callable that runs in this process."""
        ...

    def optim_step_async(self, adam: tinker_types.AdamParams) -> Awaitable[OptimStepResult]:
        """Submit an optimizer step."""
        ...

    def save_for_sampler(self, name: str) -> Awaitable[str]:
        """Keep the current weights for inference under a name; resolves to their URI."""
        ...

    def save_full_state(self, name: str) -> Awaitable[str]:
        """Keep weights and optimizer state under a name, for resume; resolves to their URI."""
        ...

    def snapshot_sampling_client(self, name: str | None = None) -> Awaitable[SamplingClient]:
        """A client that samples from the current weights; unnamed ones are not kept."""
        ...

    def open_sampling_client(
        self, model: str | None = None, weights: str | None = None
    ) -> Awaitable[SamplingClient]:
        """A client for weights that stay as they are: a teacher, a judge, the base of a KL term.

        `model` None is the base model that is trained here, without its adapter; `weights` are a
        checkpoint of the model (a folder, or an address the server knows). Ends with the backend.
        Raises UserError for a model or weights that cannot be had here.
        """
        ...

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer of the model that is trained."""
        ...

    async def export_state(self, uri: str, folder: Path) -> bool:
        """Write the files behind a `save_full_state` URI into a folder.

        PEFT's layout (`adapter_model.safetensors`, `adapter_config.json`) plus, where the server
        gives it out, the optimizer's state. False if the server keeps its files to itself.
        """
        ...

    def discard_state(self, uri: str) -> None:
        """Remove what is behind a `save_full_state` URI: the run will never go back there.

        Blocks. What cannot be removed stays, with a line in the log.
        """
        ...

    async def aclose(self) -> None:
        """End the session and whatever was started for it. Safe to call twice."""
        ...


HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9._-]+)?")
"""What the hub calls a model: by its owner, or without one, as gpt2 and others of its first."""


class ModelSpec(BaseModel):
    """Which model is trained, and how large its adapter is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    lora_rank: int = 16
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True


@dataclass(frozen=True, slots=True)
class SavedState:
    """A checkpoint to start from: the server's URI and, if the run's store has them, its files.

    With `optimizer` false only the weights are taken (a fresh start from another run's model).
    """

    uri: str | None
    folder: Path | None
    optimizer: bool = True


class BackendParams(BaseModel):
    """Base of every backend's `params:` block."""

    model_config = ConfigDict(extra="forbid")

    def weights_problems(self, source: str, where: str) -> list[Problem]:
        """Why a checkpoint (a folder, or an address) cannot be loaded there, whatever it holds."""
        return []


def held_elsewhere(reader: str, uri: str | None, where: str) -> Problem:
    """What to say of weights at a server, to a backend that has none but those in folders."""
    remedy = "give the folder of a checkpoint, or train on the server that holds it"
    return Problem(where, f"{reader} cannot read {uri}", remedy)


class BackendKind(Protocol):
    """A row of the backend registry: its parameters, its checks, and how it is opened."""

    kind: ClassVar[str]
    Params: ClassVar[type[BackendParams]]

    @staticmethod
    def check(params: Any, model: ModelSpec) -> list[Problem]:
        """Every mistake that can be found without starting compute."""
        ...

    @staticmethod
    async def open(params: Any, model: ModelSpec, state: SavedState | None) -> Backend:
        """Start or reach the compute and hand out a training client, fresh or from `state`."""
        ...
