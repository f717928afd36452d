"""The engine's computation on torch: one frozen base model, and LoRA adapters trained on it.

Shapes: N positions of one datum, B rows and T positions of a micro-batch, M real positions of a
micro-batch (padding left out), K target candidates a position, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from backends.engine.abstract import AbstractBackend, ModelNotFound, StaleVersion
from backends.engine.lora import (
    Adapter,
    TrainState,
    load_adapter,
    load_train_state,
    save_adapter,
    save_train_state,
)
from backends.engine.losses import LOSSES, TARGETS, Loss, check_request
from backends.engine.records import (
    AdamParams,
    Capabilities,
    Datum,
    FloatArray,
    IntArray,
    LoraConfig,
    OptimStepOutput,
    PassOutput,
    PassRequest,
    RequestError,
    SampleOutput,
    SampleRequest,
)
from backends.engine.torch_model import FrozenModel, micro_batches
from backends.engine.torch_sampler import TorchSampler
from backends.errors import Problem, UserError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class TorchConfig(BaseModel):
    """How the torch backend computes. None of it changes results beyond rounding."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="of the base model: bfloat16 on CUDA, else float32"
    )
    threads: int | None = Field(
        default=None, ge=1, description="CPU threads of this process; None leaves torch's choice"
    )
    micro_batch_tokens: int | None = Field(
        default=None,
        ge=1,
        description="padded tokens in one forward and backward pass; None: 2048 on CPU, else 16384",
    )
    max_lora_rank: int = Field(default=256, ge=1)
    sample_rows: int = Field(default=256, ge=1, description="sequences decoded at the same time")


class TorchBackend(AbstractBackend):
    """transformers computes, PEFT's layout is on disk, adapters are switched without a copy."""

    def __init__(self, base_model: str, config: BaseModel | None = None) -> None:
        """Load the base model (a hub name or a folder). Returns when it can serve."""
        self.config = TorchConfig.model_validate(config.model_dump() if config else {})
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        device = torch.device(_pick_device(self.config.device))
        dtype = "bfloat16" if device.type == "cuda" else "float32"
        if self.config.dtype != "auto":
            dtype = self.config.dtype
        self._base = FrozenModel(base_model, device, _DTYPES[dtype])
        self._micro_batch_tokens = self.config.micro_batch_tokens or (
            2048 if device.type == "cpu" else 16384
        )
        self._sampler = TorchSampler(
            self._base,
            max_rows=self.config.sample_rows,
            prefill_tokens=self._micro_batch_tokens,
        )
        self._models: dict[str, TrainState] = {}
        self._samplers: dict[str, Adapter] = {}

    def capabilities(self) -> Capabilities:
        """What this base model and device can do."""
        return Capabilities(
            base_model=self._base.name,
            max_context_length=self._base.max_length,
            vocab_size=self._base.vocab_size,
            losses=tuple(LOSSES),
            max_lora_rank=self.config.max_lora_rank,
            device=self._base.device.type,
            dtype=str(self._base.dtype).removeprefix("torch."),
        )

    def create_model(self, model_id: str, lora_config: LoraConfig) -> None:
        """Add a model with a fresh adapter, drawn from the config's seed alone, at version 0."""
        if model_id in self._models:
            raise UserError(Problem("model_id", f"{model_id} exists", "take another name"))
        if not 1 <= lora_config.rank <= self.config.max_lora_rank:
            raise UserError(
                Problem(
                    "lora_config.rank",
                    f"is {lora_config.rank}",
                    f"take one from 1 to {self.config.max_lora_rank}",
                )
            )
        adapter = Adapter.fresh(lora_config, self._base.slots, self._base.device)
        self._models[model_id] = TrainState(adapter)

    def delete_model(self, model_id: str) -> None:
        """Free the model's adapter, optimizer and gradients. Samplers made from it stay."""
        self._base.forget(self._model(model_id).adapter)
        del self._models[model_id]
        self._return_memory()

    def has_model(self, model_id: str) -> bool:
        """Whether the model is held here."""
        return model_id in self._models

    def version(self, model_id: str) -> int:
        """How many optimizer steps the model's weights have taken."""
        return self._model(model_id).version

    def forward_backward(
        self, batch: Sequence[PassRequest]
    ) -> dict[str, PassOutput | RequestError]:
        """Add each request's gradients (token sums) to its model's accumulator; by request id."""
        return {request.request_id: self._pass(request, train=True) for request in batch}

    def forward(self, batch: Sequence[PassRequest]) -> dict[str, PassOutput | RequestError]:
        """The same outputs without gradients."""
        return {request.request_id: self._pass(request, train=False) for request in batch}

    def optim_step(self, model_id: str, version: int, adam: AdamParams) -> OptimStepOutput:
        """One AdamW step with the accumulated gradients (zeros if there are none)."""
        model = self._model(model_id, version)
        _check_adam(adam)
        norm, factor = model.step(adam)
        return OptimStepOutput(model.version, {"grad_norm": norm, "clip_factor": factor})

    def clear_gradients(self, model_id: str) -> None:
        """Drop the accumulated gradients; weights, moments and version stay."""
        self._model(model_id).gradients.zero_()

    def sample(self, batch: Sequence[SampleRequest]) -> dict[str, SampleOutput | RequestError]:
        """Draw from sampler weights; a sample depends on its request alone, not on the batch."""
        return self._sampler.sample(batch, self._samplers)

    def serve_samples(
        self,
        arriving: Callable[[], Sequence[SampleRequest]],
        finished: Callable[[str, SampleOutput | RequestError], None],
    ) -> None:
        """The same for requests that join while others run."""
        self._sampler.serve(arriving, finished, self._samplers)

    def save_checkpoint(self, output_path: Path, model_id: str) -> None:
        """Write adapter (PEFT layout), optimizer and version into the folder; no pickles."""
        save_train_state(output_path, self._model(model_id), self._base.name)

    def load_checkpoint(self, checkpoint_path: Path, model_id: str, *, optimizer: bool) -> None:
        """Create or overwrite the model from a folder; on any error it stays as it was."""
        state = load_train_state(
            checkpoint_path, self._base.slots, self._base.device, optimizer=optimizer
        )
        if model_id in self._models:
            self.delete_model(model_id)
        self._models[model_id] = state

    def save_sampler_checkpoint(
        self, output_path: Path | None, model_id: str, sampler_id: str, *, persist: bool = True
    ) -> None:
        """Freeze the model's weights under `sampler_id`; with `persist` write the adapter too."""
        adapter = self._model(model_id).adapter.frozen_copy()
        if persist:
            if output_path is None:
                raise ValueError("persist=True needs an output_path")
            save_adapter(output_path, adapter, self._base.name)
        self._samplers[sampler_id] = adapter

    def load_sampler_checkpoint(self, checkpoint_path: Path, sampler_id: str) -> None:
        """Make an adapter on disk (from either kind of save) available under `sampler_id`."""
        self._samplers[sampler_id] = load_adapter(
            checkpoint_path, self._base.slots, self._base.device
        )

    def has_sampler(self, sampler_id: str) -> bool:
        """Whether the sampler is held here."""
        return sampler_id in self._samplers

    def delete_sampler(self, sampler_id: str) -> None:
        """Free the sampler's weights."""
        if sampler_id not in self._samplers:
            raise ModelNotFound(sampler_id)
        self._base.forget(self._samplers.pop(sampler_id))
        self._return_memory()

    def _return_memory(self) -> None:
        if self._base.device.type == "cuda":
            torch.cuda.empty_cache()

    def _model(self, model_id: str, version: int | None = None) -> TrainState:
        if model_id not in self._models:
            raise ModelNotFound(f"no model {model_id} is held here")
        model = self._models[model_id]
        if version is not None and version != model.version:
            raise StaleVersion(f"{model_id} is at version {model.version}, not {version}")
        return model

    def _pass(self, request: PassRequest, *, train: bool) -> PassOutput | RequestError:
        try:
            model = self._model(request.model_id, request.version)
        except (ModelNotFound, StaleVersion) as error:
            return RequestError(str(error.args[0]), category="server")
        if problem := check_request(
            request.loss_fn,
            request.data,
            request.loss_config,
            vocab_size=self._base.vocab_size,
            max_length=self._base.max_length,
        ):
            return RequestError(problem)
        self._base.activate(model.adapter, model.pending_matrices)
        try:
            output = self._run(request, train=train)
            if train and isinstance(output, PassOutput):
                if problem := _not_finite(model.pending):
                    return RequestError(problem)
                model.keep_pending()
            return output
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            return RequestError(
                "the device ran out of memory; send shorter sequences, or have the engine's "
                "micro_batch_tokens lowered",
                category="server",
            )
        finally:
            if train:
                model.drop_pending()

    def _run(self, request: PassRequest, *, train: bool) -> PassOutput | RequestError:
        """Every micro-batch of the request in turn; gradients go to the model's pending ones."""
        loss = LOSSES[request.loss_fn]
        settings = loss.settings(request.loss_config)
        groups = _groups(request.data, self._micro_batch_tokens)
        outputs: list[FloatArray | None] = [None] * len(request.data)
        loss_sum = 0.0
        for group in groups:
            packed = _pack([request.data[index] for index in group], loss, self._base.device)
            with torch.set_grad_enabled(train):
                value, logprobs = self._loss(packed, loss, settings)
            loss_sum += float(value.detach())
            if not math.isfinite(loss_sum):
                return RequestError(
                    f"loss_fn: {loss.name} came to {loss_sum} on data {group}; "
                    "lower the learning rate or go back to a checkpoint"
                )
            if value.requires_grad:
                value.backward()
            for index, part in zip(group, packed.unpack(logprobs), strict=True):
                outputs[index] = part.reshape(request.data[index].loss_inputs[TARGETS].shape)
        tokens = sum(d.tokens.size for d in request.data)
        return PassOutput(
            tuple({"logprobs": part} for part in outputs if part is not None),
            {"loss:sum": loss_sum, "tokens:sum": float(tokens)},
        )

    def _loss(
        self, packed: _Packed, loss: Loss, settings: Mapping[str, float]
    ) -> tuple[Tensor, Tensor]:
        """The loss sum of a micro-batch and the logprobs [M, K] of all its targets.

        Positions that add nothing to the loss get their logprobs without a backward pass.
        """
        hidden = self._base.decoder.hidden(packed.ids).flatten(0, 1)
        if packed.positions is not None:
            hidden = hidden.index_select(0, packed.positions)
        if packed.live is None or not torch.is_grad_enabled():
            logprobs = self._base.logprobs(hidden, packed.targets)
            return loss.formula(logprobs, packed.inputs, settings), logprobs.detach()
        live = packed.live
        logprobs = self._base.logprobs(
            hidden.index_select(0, live), packed.targets.index_select(0, live)
        )
        inputs = {name: values.index_select(0, live) for name, values in packed.inputs.items()}
        value = loss.formula(logprobs, inputs, settings)
        everywhere = packed.targets.new_empty(packed.targets.shape, dtype=torch.float32)
        everywhere[live] = logprobs.detach()
        with torch.no_grad():
            silent = packed.silent
            everywhere[silent] = self._base.logprobs(
                hidden.index_select(0, silent), packed.targets.index_select(0, silent)
            )
        return value, everywhere


@dataclass(frozen=True, slots=True)
class _Packed:
    """A micro-batch on the device: padded `ids` [B, T], all else [M, K] without padding."""

    ids: Tensor
    positions: Tensor | None
    """Where the M real positions lie in the flattened ids; None if there is no padding."""
    live: Tensor | None
    """Which of the M positions have a gradient; None if all do."""
    silent: Tensor
    """The others."""
    targets: Tensor
    inputs: Mapping[str, Tensor]
    lengths: IntArray
    """Per datum N."""

    def unpack(self, values: Tensor) -> list[FloatArray]:
        """[M, K] on the device to one [N, K] array a datum."""
        array = values.float().cpu().numpy()
        return np.split(array, np.cumsum(self.lengths)[:-1])


def _groups(data: Sequence[Datum], budget: int) -> list[list[int]]:
    """Micro-batches of indices. Datums of unlike K stay apart: all are laid out as the widest."""
    by_width: dict[int, list[int]] = {}
    for index, datum in enumerate(data):
        width = datum.loss_inputs[TARGETS].size // datum.tokens.size
        by_width.setdefault(width, []).append(index)
    return [
        [indices[place] for place in group]
        for indices in by_width.values()
        for group in micro_batches([data[index].tokens.size for index in indices], budget)
    ]


def _pack(data: Sequence[Datum], loss: Loss, device: torch.device) -> _Packed:
    """Lay datums of one K out as one micro-batch."""
    lengths = np.array([datum.tokens.size for datum in data])
    ids = np.zeros((len(data), lengths.max()), np.int64)
    real = np.arange(ids.shape[1]) < lengths[:, None]
    ids[real] = np.concatenate([datum.tokens for datum in data])
    width = data[0].loss_inputs[TARGETS].size // data[0].tokens.size

    def joined(name: str, dtype: type[np.generic], default: float = 0) -> Tensor:
        out = np.full((lengths.sum(), width), default, dtype)
        start = 0
        for datum in data:
            n = datum.tokens.size
            if (values := datum.loss_inputs.get(name)) is not None:
                out[start : start + n] = values.reshape(n, width)
            start += n
        return torch.from_numpy(out).to(device)

    targets = joined(TARGETS, np.int64)
    inputs = {row.name: joined(row.name, np.float32, row.default or 0.0) for row in loss.inputs}
    heard = torch.ones(len(targets), dtype=torch.bool, device=device)
    if loss.silent_at_zero is not None:
        heard = (inputs[loss.silent_at_zero] != 0).any(-1)
    return _Packed(
        ids=torch.from_numpy(ids).to(device),
        positions=None if real.all() else torch.from_numpy(np.flatnonzero(real)).to(device),
        live=None if heard.all() else heard.nonzero()[:, 0],
        silent=heard.logical_not().nonzero()[:, 0],
        targets=targets,
        inputs=inputs,
        lengths=lengths,
    )


def _check_adam(adam: AdamParams) -> None:
    """Any finite learning rate and weight decay; the rest as torch.optim.AdamW has it."""
    rules = (
        ("learning_rate", math.isfinite(adam.learning_rate), "a finite number"),
        ("beta1", 0 <= adam.beta1 < 1, "a number from 0 to below 1"),
        ("beta2", 0 <= adam.beta2 < 1, "a number from 0 to below 1"),
        ("eps", 0 <= adam.eps < math.inf, "0 or a finite number above it"),
        ("weight_decay", math.isfinite(adam.weight_decay), "a finite number"),
        ("grad_clip_norm", 0 <= adam.grad_clip_norm < math.inf, "0 (off) or a finite norm"),
    )
    wrong = [
        Problem(f"adam_params.{name}", f"is {getattr(adam, name)}", f"give {remedy}")
        for name, good, remedy in rules
        if not good
    ]
    if wrong:
        raise UserError(*wrong)


def _out_of_memory(error: Exception) -> bool:
    """CUDA and Python have an exception for it; the CPU's allocator has only its words."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        "can't allocate memory" in str(error)
    )


def _not_finite(gradients: Tensor) -> str | None:
    if gradients.isfinite().all():
        return None
    return (
        "loss_fn: a gradient is not finite, none was kept; scale the weights or advantages down, "
        "or go back to a checkpoint"
    )


def _pick_device(wanted: str) -> str:
    """The device that is wanted, or for "auto" the best there is. Raises UserError without it."""
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if wanted == "auto":
        return next(device for device in there if there[device])
    if not there[wanted]:
        have = ", ".join(device for device in there if there[device])
        raise UserError(
            Problem(
                "device",
                f"{wanted} is not there on this machine, or torch {torch.__version__} is not "
                "built for it",
                f"take one of: auto, {have}",
            )
        )
    return wanted
