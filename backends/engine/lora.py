"""LoRA adapters: slots on the frozen base, an adapter's weights, its files in PEFT's layout.

The base keeps one slot on each linear layer that can carry LoRA. An adapter is a set of A [r, in]
and B [out, r] matrices; making it the active one only points the slots at them, so any number of
adapters share a base that is never written to, and nothing of one reaches another.

All matrices of an adapter lie in one flat float32 buffer: the optimizer, the gradient norm and the
accumulation each are one operation over it, whatever the number of layers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from backends.engine.abstract import ModelNotFound
from backends.engine.records import AdamParams, LoraConfig
from backends.errors import Problem, UserError

LORA_ALPHA = 32.0
"""Tinker's documented convention: W + (alpha / rank) * B @ A with alpha fixed."""

ATTENTION_LAYERS = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj"})
MLP_LAYERS = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj"})
_SAME_INPUT = (frozenset({"q_proj", "k_proj", "v_proj"}), frozenset({"gate_proj", "up_proj"}))

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
OPTIMIZER_STATE = "optimizer.safetensors"
MODEL_STATE = "state.json"

_LEAST_EPS = torch.finfo(torch.float32).tiny
"""Stands for 0: lost in any root of a second moment, but 0 / 0 stays 0 where no gradient is, as in
A at the first step."""
_ALIGNMENT = 64
"""Buffers of matrices start at multiples of this many floats, for vector loads."""
_PEFT_KEY = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<matrix>[AB])\.weight")


class LoraSlot(nn.Module):  # type: ignore[misc]
    """A frozen linear layer y = W x, to which the active adapter adds scale * B A x."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.matrices: tuple[Tensor, Tensor] | None = None
        self.scale = 0.0

    def activate(self, adapter: Adapter | None, path: str) -> None:
        """Add what the adapter has for the layer at `path`, or nothing."""
        self.matrices = adapter.matrices.get(path) if adapter is not None else None
        self.scale = adapter.scale if adapter is not None else 0.0

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        y = functional.linear(rows, self.weight, self.bias)
        if self.matrices is not None:
            a, b = (matrix.to(x.dtype) for matrix in self.matrices)
            y.addmm_(rows @ a.t(), b.t(), alpha=self.scale)
        return y.view(*x.shape[:-1], y.shape[-1])


def install_slots(model: nn.Module) -> dict[str, LoraSlot]:
    """Put a slot on every attention and MLP projection and on the head; by layer path."""
    head = model.get_output_embeddings()
    found = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and (module is head or path.rpartition(".")[2] in ATTENTION_LAYERS | MLP_LAYERS)
    }
    slots = {path: LoraSlot(linear) for path, linear in found.items()}
    for path, slot in slots.items():
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, slot)
    return slots


def _siblings(layers: Iterable[str]) -> Iterator[list[str]]:
    """Layers that read the same input and lie beside each other in the model; others alone."""

    def key(path: str) -> tuple[str, ...]:
        parent, _, leaf = path.rpartition(".")
        together = [names for names in _SAME_INPUT if leaf in names]
        return (parent, *sorted(together[0])) if together else (path,)

    for _, paths in groupby(layers, key):
        yield list(paths)


def _aligned(floats: int) -> int:
    return -(-floats // _ALIGNMENT) * _ALIGNMENT


def chosen_layers(config: LoraConfig, slots: Mapping[str, LoraSlot]) -> list[str]:
    """The layer paths that a config trains, in the model's order."""
    groups = (
        ("train_attn", config.train_attn, ATTENTION_LAYERS),
        ("train_mlp", config.train_mlp, MLP_LAYERS),
        ("train_unembed", config.train_unembed, None),
    )
    chosen: set[str] = set()
    for flag, wanted, names in groups:
        layers = {path for path in slots if _in_group(path, names)}
        if wanted and not layers:
            raise UserError(
                Problem(flag, "this base model has no such linear layers", f"set {flag} to false")
            )
        chosen |= layers if wanted else set()
    if not chosen:
        raise UserError(
            Problem("lora_config", "trains no layer", "set train_attn, train_mlp or train_unembed")
        )
    return [path for path in slots if path in chosen]


def _in_group(path: str, names: frozenset[str] | None) -> bool:
    leaf = path.rpartition(".")[2]
    return leaf in names if names is not None else leaf not in ATTENTION_LAYERS | MLP_LAYERS


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """The matrices of one adapter: `matrices[layer]` = (A [r, in], B [out, r]), views of `flat`.

    The A's of layers with the same input follow each other without a gap.
    """

    config: LoraConfig
    alpha: float
    flat: Tensor
    matrices: Mapping[str, tuple[Tensor, Tensor]]

    @classmethod
    def zeros(
        cls, config: LoraConfig, alpha: float, layers: Mapping[str, LoraSlot], device: torch.device
    ) -> Adapter:
        """An adapter over `layers` with every entry 0."""
        shapes = {path: slot.weight.shape for path, slot in layers.items()}
        starts: dict[tuple[str, str], int] = {}
        end = 0
        for paths in _siblings(layers):
            for letter, path in (("A", path) for path in paths):
                starts[letter, path] = end
                end += config.rank * shapes[path][1]
            end = _aligned(end)
            for letter, path in (("B", path) for path in paths):
                starts[letter, path] = end
                end = _aligned(end + shapes[path][0] * config.rank)
        flat = torch.zeros(end, device=device)

        def view(letter: str, path: str, rows: int, columns: int) -> Tensor:
            return flat.as_strided((rows, columns), (columns, 1), starts[letter, path])

        matrices = {
            path: (view("A", path, config.rank, columns), view("B", path, rows, config.rank))
            for path, (rows, columns) in shapes.items()
        }
        return cls(config, alpha, flat, matrices)

    @classmethod
    def fresh(
        cls, config: LoraConfig, slots: Mapping[str, LoraSlot], device: torch.device
    ) -> Adapter:
        """B is 0 and A uniform in +-1/sqrt(in), as in PEFT; drawn from the config's seed alone."""
        layers = {path: slots[path] for path in chosen_layers(config, slots)}
        adapter = cls.zeros(config, LORA_ALPHA, layers, device)
        generator = torch.Generator()
        generator.manual_seed(generator.seed() if config.seed is None else config.seed)
        for a, _ in adapter.matrices.values():
            bound = a.shape[1] ** -0.5
            a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))
        return adapter

    @property
    def scale(self) -> float:
        """What B A is multiplied with."""
        return self.alpha / self.config.rank

    def stacked(self, paths: Sequence[str]) -> Tensor:
        """The A's of layers that read the same input, one below the other: [n r, in], a view."""
        first = self.matrices[paths[0]][0]
        rows, columns = first.shape
        return first.as_strided((len(paths) * rows, columns), (columns, 1))

    def like(self, flat: Tensor) -> Adapter:
        """The same layout over another buffer [of the same size]."""
        views = {
            path: tuple(
                flat.as_strided(matrix.shape, matrix.stride(), matrix.storage_offset())
                for matrix in pair
            )
            for path, pair in self.matrices.items()
        }
        return Adapter(self.config, self.alpha, flat, views)

    def frozen_copy(self) -> Adapter:
        """A copy that later steps do not change."""
        return self.like(self.flat.detach().clone())

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Every matrix under its name in PEFT's files."""
        for path, pair in self.matrices.items():
            for letter, matrix in zip("AB", pair, strict=True):
                yield f"base_model.model.{path}.lora_{letter}.weight", matrix


class TrainState:
    """An adapter in training: weights, accumulated gradients, AdamW moments, version."""

    def __init__(self, adapter: Adapter, version: int = 0) -> None:
        self.adapter = adapter
        self.version = version
        self.pending = torch.zeros_like(adapter.flat)
        """Gradients of the request being worked on; autograd adds to it through the views."""
        self._weights = nn.Parameter(adapter.flat, requires_grad=False)
        self._weights.grad = torch.zeros_like(adapter.flat)
        fused = adapter.flat.device.type in ("cpu", "cuda", "mps")
        self._optimizer = torch.optim.AdamW([self._weights], fused=fused)
        self.pending_matrices = adapter.like(self.pending)
        """The same as matrices."""
        gradients = self.pending_matrices.named()
        for (_, matrix), (_, gradient) in zip(adapter.named(), gradients, strict=True):
            matrix.requires_grad_()
            matrix.grad = gradient

    @property
    def gradients(self) -> Tensor:
        """The sum over all requests since the last step, laid out as `adapter.flat`."""
        gradients: Tensor = self._weights.grad
        return gradients

    def keep_pending(self) -> None:
        """Add the request's gradients to the accumulated ones."""
        self.gradients.add_(self.pending)

    def drop_pending(self) -> None:
        """Forget the request's gradients."""
        self.pending.zero_()

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, adam: AdamParams) -> tuple[float, float]:
        """One AdamW step; returns the gradient norm before clipping and the factor it clipped by.

        Without accumulated gradients it is a step with zero gradients: moments decay, weights
        move on with them and with the weight decay. Gradients whose norm is not finite are
        dropped with a UserError, and nothing moves.
        """
        norm = self._gradient_norm()
        if norm != norm or norm == float("inf"):
            self.gradients.zero_()
            raise UserError(
                Problem(
                    "optim_step",
                    f"the norm of the accumulated gradients is {norm}; the step was not taken and "
                    "the gradients were dropped",
                    "scale the weights or advantages down, or go back to a checkpoint",
                )
            )
        factor = 1.0
        if adam.grad_clip_norm > 0:
            factor = min(1.0, adam.grad_clip_norm / (norm + 1e-6))
            self.gradients.mul_(factor)
        self._optimizer.param_groups[0].update(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=max(adam.eps, _LEAST_EPS),
            weight_decay=adam.weight_decay,
        )
        self._optimizer.step()
        self.gradients.zero_()
        self.version += 1
        return norm, factor

    def _gradient_norm(self) -> float:
        """Of all matrices together; one float32 sum over 10 million squares is off by 4e-4."""
        rows = torch.linalg.vector_norm(self.gradients.view(-1, _ALIGNMENT), dim=1)
        return float(torch.linalg.vector_norm(rows.cpu(), dtype=torch.float64))

    def moments(self) -> dict[str, Tensor]:
        """exp_avg, exp_avg_sq and step of every matrix, as `<PEFT name>.<moment>`."""
        state = self._optimizer.state.get(self._weights, {})
        step = torch.as_tensor(float(state.get("step", 0.0)))
        tensors: dict[str, Tensor] = {}
        for moment in ("exp_avg", "exp_avg_sq"):
            flat = state.get(moment)
            view = self.adapter.like(torch.zeros_like(self.adapter.flat) if flat is None else flat)
            tensors |= {f"{name}.{moment}": matrix for name, matrix in view.named()}
        return tensors | {f"{name}.step": step.clone() for name, _ in self.adapter.named()}

    def set_moments(self, tensors: Mapping[str, Tensor]) -> None:
        """Take back what `moments` gave; names and shapes have been checked."""
        state: dict[str, Tensor] = {}
        for moment in ("exp_avg", "exp_avg_sq"):
            state[moment] = torch.zeros_like(self.adapter.flat)
            for name, matrix in self.adapter.like(state[moment]).named():
                matrix.copy_(tensors[f"{name}.{moment}"])
        step = next(tensors[f"{name}.step"] for name, _ in self.adapter.named())
        state["step"] = step.to(torch.float32).clone()
        if self.adapter.flat.device.type == "cuda":
            state["step"] = state["step"].to(self.adapter.flat.device)
        self._optimizer.state[self._weights] = state


def save_adapter(folder: Path, adapter: Adapter, base_model: str) -> None:
    """Write weights and config so that `PeftModel.from_pretrained(base, folder)` takes them."""
    import peft

    folder.mkdir(parents=True, exist_ok=True)
    _save_tensors(folder / ADAPTER_WEIGHTS, dict(adapter.named()))
    config = peft.LoraConfig(
        r=adapter.config.rank,
        lora_alpha=int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha,
        target_modules={path.rpartition(".")[2] for path in adapter.matrices},
        task_type="CAUSAL_LM",
        base_model_name_or_path=base_model,
        inference_mode=True,
    )
    # PEFT makes a set of them, whose order is another in each process: a replay has to give the
    # same file.
    config.target_modules = sorted(config.target_modules)
    config.save_pretrained(str(folder))


def save_train_state(folder: Path, state: TrainState, base_model: str) -> None:
    """Write a full checkpoint: adapter, moments, version. Accumulated gradients are not in it."""
    save_adapter(folder, state.adapter, base_model)
    _save_tensors(folder / OPTIMIZER_STATE, state.moments())
    document = {"format": 1, "version": state.version, "lora": asdict(state.adapter.config)}
    (folder / MODEL_STATE).write_text(json.dumps(document, indent=2) + "\n")


def load_adapter(folder: Path, slots: Mapping[str, LoraSlot], device: torch.device) -> Adapter:
    """Read an adapter that this engine or PEFT wrote; raises ModelNotFound or UserError."""
    document = _read_json(folder / ADAPTER_CONFIG)
    for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if document.get(key):
            raise _unfit(ADAPTER_CONFIG, f"sets {key}, which this engine does not know")
    tensors = _load_tensors(folder / ADAPTER_WEIGHTS)
    layers = _layers_of(tensors, slots)
    try:
        rank, alpha = int(document["r"]), float(document["lora_alpha"])
    except (KeyError, TypeError, ValueError) as error:
        raise _unfit(ADAPTER_CONFIG, f"has no usable r and lora_alpha ({error!r})") from error
    config = LoraConfig(
        rank=rank,
        train_attn=any(_in_group(path, ATTENTION_LAYERS) for path in layers),
        train_mlp=any(_in_group(path, MLP_LAYERS) for path in layers),
        train_unembed=any(_in_group(path, None) for path in layers),
    )
    if (folder / MODEL_STATE).is_file():
        config = _read_state(folder)[1]
    adapter = Adapter.zeros(config, alpha, layers, device)
    _fill(dict(adapter.named()), tensors, ADAPTER_WEIGHTS)
    return adapter


def load_train_state(
    folder: Path, slots: Mapping[str, LoraSlot], device: torch.device, *, optimizer: bool
) -> TrainState:
    """Read a checkpoint to train on from; without `optimizer`, moments and version start new."""
    state = TrainState(load_adapter(folder, slots, device))
    if optimizer:
        if not (folder / OPTIMIZER_STATE).is_file():
            raise _unfit(OPTIMIZER_STATE, "is missing", "load it without the optimizer")
        tensors, expected = _load_tensors(folder / OPTIMIZER_STATE), state.moments()
        _fill(expected, tensors, OPTIMIZER_STATE)
        state.set_moments(expected)
        state.version, _ = _read_state(folder)
    return state


def _read_state(folder: Path) -> tuple[int, LoraConfig]:
    document = _read_json(folder / MODEL_STATE)
    try:
        return int(document["version"]), LoraConfig(**document["lora"])
    except (KeyError, TypeError, ValueError) as error:
        raise _unfit(MODEL_STATE, f"does not describe a model ({error!r})") from error


def _layers_of(tensors: Mapping[str, Tensor], slots: Mapping[str, LoraSlot]) -> dict[str, LoraSlot]:
    layers = set()
    for name in tensors:
        match = _PEFT_KEY.fullmatch(name)
        if match is None or match["layer"] not in slots:
            raise _unfit(ADAPTER_WEIGHTS, f"{name} has no place in this base model")
        layers.add(match["layer"])
    return {path: slot for path, slot in slots.items() if path in layers}


@torch.no_grad()  # type: ignore[untyped-decorator]
def _fill(expected: Mapping[str, Tensor], tensors: Mapping[str, Tensor], file: str) -> None:
    for name, place in expected.items():
        if name not in tensors:
            raise _unfit(file, f"{name} is missing")
        if tensors[name].shape != place.shape:
            shapes = f"{list(tensors[name].shape)}, not {list(place.shape)}"
            raise _unfit(file, f"{name} has shape {shapes}")
        place.copy_(tensors[name])


def _unfit(file: str, what: str, remedy: str = "") -> UserError:
    return UserError(Problem(file, what, remedy or "load it on the base model it was made for"))


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ModelNotFound(f"{path.parent.name} holds no {path.name}")
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except SafetensorError as error:
        raise _unfit(path.name, f"cannot be read: {error}", "restore it from a backup") from error
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ModelNotFound(f"{path.parent.name} holds no {path.name}")
    try:
        document: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise _unfit(path.name, f"is not JSON: {error}", "restore it from a backup") from error
    return document
