"""Which layers of a transformers model get a LoRA adapter, and that these get one and no others.

PEFT takes patterns, and for some architectures it rewrites them; so what it has done is compared
with what was wanted, before a step is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from backends.base import ModelSpec
from backends.errors import Problem, UserError, first_line

if TYPE_CHECKING:
    from torch import nn

ADAPTER = "default"

_ATTENTION_PARTS = ("attn", "attention")
_MLP_PARTS = ("mlp", "ffn", "feed_forward", "feedforward", "expert", "moe")
"""What architectures call the modules that hold the layers of a group."""

Group = Literal["train_attn", "train_mlp"]
"""Layers that are trained or left out together, by the parameter that says so."""


def add_adapter(model: nn.Module, spec: ModelSpec) -> Any:
    """The model with a LoRA adapter on the layers that the spec wants, its weights still PEFT's.

    Raises UserError for a model on which PEFT does not put adapters on just these.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers.pytorch_utils import Conv1D

    from backends.engine.lora import LORA_ALPHA

    wanted = wanted_layers(model, spec)
    config = LoraConfig(
        r=spec.lora_rank,
        lora_alpha=int(LORA_ALPHA),
        target_modules=_targets(model, wanted),
        task_type="CAUSAL_LM",
        fan_in_fan_out=any(isinstance(model.get_submodule(path), Conv1D) for path in wanted),
    )
    device = next(model.parameters()).device
    drawing = [device] if device.type == "cuda" else []  # left to itself torch forks every GPU's
    with torch.random.fork_rng(drawing), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks by a name that is on its way out
        try:
            adapted = get_peft_model(model, config, adapter_name=ADAPTER)
        except ValueError as error:
            what = f"{spec.name} gets no adapter from PEFT: {first_line(error)}"
            raise UserError(Problem("model.name", what, "take another model")) from error
    prefix = "base_model.model."
    got = {path.removeprefix(prefix) for path, _ in adapted_layers(adapted)}
    if differing := sorted(got ^ set(wanted)):
        does = "puts an adapter on" if differing[0] in got else "puts no adapter on"
        what = f"PEFT {does} {differing[0]} of {spec.name}, and the run wants it otherwise"
        remedy = "set train_attn or train_mlp to false, whichever group that layer is in"
        raise UserError(Problem("model.name", what, remedy))
    return adapted


def adapted_layers(adapted: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers of a model that carry the adapter, by path, in the model's order."""
    for path, module in adapted.named_modules():
        if ADAPTER in getattr(module, "lora_A", {}):
            yield path, module


def wanted_layers(model: nn.Module, spec: ModelSpec) -> list[str]:
    """The paths of the linear layers that a spec trains: never the head, which TRL cannot train.

    With both groups on these are all of them, whatever the architecture calls them. Raises
    UserError if the architecture does not say which layers a group has, or keeps experts of a group
    in stacked tensors, on which no adapter would be.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    groups = {
        path: _group(path)
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    on = {group for group in ("train_attn", "train_mlp") if getattr(spec, group)}
    if problems := list(_stacked(model, spec, on)):
        raise UserError(*problems)
    if len(on) == 2:
        return list(groups)
    if unplaced := {_leaf(path) for path, group in groups.items() if group is None}:
        names = ", ".join(sorted(unplaced))
        what = f"{spec.name} does not say whether {names} are attention or MLP layers"
        remedy = "leave train_attn and train_mlp on: then all linear layers are trained"
        raise UserError(Problem("algorithm.params", what, remedy))
    wanted = [path for path, group in groups.items() if group in on]
    if not wanted:
        what = f"{spec.name} has no linear layers of the groups that are to be trained"
        raise UserError(
            Problem("algorithm.params", what, "leave train_attn and train_mlp on, or one of them")
        )
    return wanted


def _group(path: str) -> Group | None:
    """Which group a layer is in: by its own name, as in the engine, else by what holds it."""
    from backends.engine.lora import ATTENTION_LAYERS, MLP_LAYERS

    if _leaf(path) in ATTENTION_LAYERS:
        return "train_attn"
    if _leaf(path) in MLP_LAYERS:
        return "train_mlp"
    holders = path.rpartition(".")[0].lower()
    if any(part in holders for part in _ATTENTION_PARTS):
        return "train_attn"
    if any(part in holders for part in _MLP_PARTS):
        return "train_mlp"
    return None


def _stacked(model: nn.Module, spec: ModelSpec, on: set[str]) -> Iterator[Problem]:
    """A problem for each group that is on and has experts in tensors [experts, in, out]."""
    from torch.nn.modules.conv import _ConvNd

    first: dict[Group, str] = {}
    for holder, module in model.named_modules():
        if isinstance(module, _ConvNd):
            continue
        for name, weight in module.named_parameters(recurse=False):
            path = f"{holder}.{name}"
            group = _group(path)
            if group in on and weight.dim() == 3 and min(weight.shape) > 1:
                first.setdefault(group, path)
    for group, path in first.items():
        other = "train_attn" if group == "train_mlp" else "train_mlp"
        yield Problem(
            f"algorithm.params.{group}",
            f"the experts of {spec.name} are no linear layers ({path} is one tensor for all of "
            "them) and get no adapter here",
            f"set {group} to false and leave {other} on",
        )


def _targets(model: nn.Module, wanted: list[str]) -> list[str]:
    """What PEFT is to look for: the layers' names, or their paths if others have such a name."""
    chosen = set(wanted)
    names = {_leaf(path) for path in wanted}
    others = {_leaf(path) for path, _ in model.named_modules() if path not in chosen}
    return sorted(chosen if names & others else names)


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]
