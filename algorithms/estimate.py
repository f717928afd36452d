"""What an experiment will take, before anything starts: steps, tokens, memory, price.

Counted from the rows, the model's small files and the parameters; no compute library is imported.
Figures are for planning: tokens come from a sample of the rows, memory from rules of thumb.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from algorithms.data.dataset import Dataset, load_dataset
from algorithms.data.shapes import Row, is_text
from algorithms.experiment import Experiment
from algorithms.local.options import no_full_batch
from algorithms.model_facts import (
    Shapes,
    file_of,
    read_config,
    read_tokenizer,
    text_config,
    weight_shapes,
)
from algorithms.registry import algorithm_class
from backends.base import ModelSpec
from backends.errors import UserError

SAMPLED_ROWS = 500
TURN_TOKENS = 5
"""What a chat template puts around each turn, about."""
TEXTS = ("prompt", "messages", "completion", "chosen", "rejected")

LAYERS = ("num_hidden_layers", "n_layer", "n_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
"""What architectures call a model's depth and width in their configs."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
ADAPTER_BYTES = 16
"""Of each adapter weight: itself, its gradient and Adam's two moments, each float32."""
LAYER_BYTES = 43
"""Of each token, layer and hidden unit, kept for the backward pass where numbers have 2 bytes: as
measured on Qwen3 with LoRA in transformers (fused kernels need 34: Korthikanti et al. 2022)."""
LOGIT_COPIES = {"embedded": 2, "local": 6}
"""Of a token's logits in float32: the gradient and, in TRL's trainers, what their metrics and the
loss make of them (measured on local_sft; local_dpo takes half as much again)."""
DEVICES = ("cuda", "mps")
MICRO_BATCH_TOKENS = {"cpu": 2048, "other": 16384}
"""The embedded engine's own, in one forward and backward pass."""


@dataclass(frozen=True)
class Memory:
    """Bytes that training takes in each process, by what for; sampling's cache comes on top."""

    base: int
    adapter: int
    activations: int
    processes: int = 1

    @property
    def total(self) -> int:
        """All of it, in one process."""
        return self.base + self.adapter + self.activations


@dataclass(frozen=True)
class Estimate:
    """What a run takes; None where the files that would say are not on this machine.

    `tokens` are those that are trained on, and for algorithms that sample the most that there can
    be, of which `sampled` are drawn from the model.
    """

    rows: int
    steps: int
    tokens_per_row: float | None
    tokens: int | None
    sampled: int
    on_policy: bool
    memory: Memory | None


@dataclass(frozen=True)
class _Plan:
    """What decides the size of a run, whichever its algorithm: parameters that it has or has not.

    `processes` share each batch; more than one, or micro-batches, leave out one that is not full.
    """

    params: Mapping[str, Any]
    backend: Mapping[str, Any]
    on_policy: bool

    @property
    def processes(self) -> int:
        return int(self.backend.get("num_processes", 1))

    @property
    def rollouts(self) -> int:
        """Answers to each prompt."""
        return int(self.params.get("num_samples", 1)) if self.on_policy else 1

    @property
    def longest_answer(self) -> int:
        """Tokens that are sampled for each rollout, at most."""
        return int(self.params.get("max_tokens", 0)) if self.on_policy else 0

    @property
    def rows_at_a_time(self) -> int:
        """Rows that pass through the model of a process together."""
        share = self.params["batch_size"] // self.processes
        return int(self.params.get("micro_batch_size") or share)

    def tokens_at_a_time(self, backend: str, lengths: Sequence[int] | None) -> int | None:
        """Tokens that one forward and backward pass holds; None if that hangs on the rows."""
        if backend == "embedded":
            return MICRO_BATCH_TOKENS["other" if self.backend["device"] in DEVICES else "cpu"]
        if lengths is None:
            return None
        longest = max(lengths) + self.longest_answer  # shorter ones are padded to this
        return self.rows_at_a_time * self.rollouts * longest

    def steps(self, max_steps: int | None, rows: int, per_row: float | None) -> int:
        """Optimizer steps of the whole run."""
        if max_steps is not None:
            return max_steps
        params = self.params
        epochs = params["num_epochs"] * params.get("num_substeps", 1)
        budget, batch_size = params.get("max_tokens_per_batch"), params["batch_size"]
        if budget is not None and per_row is not None:
            per_epoch = -(-round(rows * per_row) // budget)
        elif self.processes > 1 or self.rows_at_a_time < batch_size:
            per_epoch = rows // batch_size
            if not per_epoch:
                raise UserError(no_full_batch(rows, batch_size))
        else:
            per_epoch = -(-rows // batch_size)
        return int(per_epoch * epochs)


def estimate(experiment: Experiment) -> Estimate:
    """Read the rows and work it out. Raises UserError for rows that do not load, or are too few."""
    dataset = load_dataset(experiment.data)
    section, backend = experiment.algorithm, experiment.backend
    params = section.params.model_dump()
    on_policy = algorithm_class(section.kind).on_policy or "num_samples" in params  # TRL samples
    plan = _Plan(params, backend.params.model_dump(), on_policy)
    lengths = _lengths(dataset, experiment.model.name, params.get("max_seq_len"))
    per_row = None if lengths is None else sum(lengths) / len(lengths)
    steps = plan.steps(section.params.max_steps, len(dataset), per_row)
    seen = steps * params["batch_size"] * plan.rollouts // params.get("num_substeps", 1)
    sampled = seen * plan.longest_answer
    tokens = None if per_row is None else round(seen * per_row) + sampled
    budget = params.get("max_tokens_per_batch")
    if budget is not None:
        tokens = None if per_row is None else min(steps * budget, tokens or 0)
    memory = None
    if backend.kind in LOGIT_COPIES:  # those that compute on this machine
        at_a_time = plan.tokens_at_a_time(backend.kind, lengths)
        memory = _memory(experiment.model_spec(), plan, at_a_time, LOGIT_COPIES[backend.kind])
    return Estimate(len(dataset), steps, per_row, tokens, sampled, on_policy, memory)


def in_sum(stages: Sequence[Estimate]) -> Estimate:
    """What runs take one after the other; the memory is that of the one that takes most."""
    tokens = [stage.tokens for stage in stages]
    memories = [stage.memory for stage in stages if stage.memory is not None]
    return Estimate(
        rows=sum(stage.rows for stage in stages),
        steps=sum(stage.steps for stage in stages),
        tokens_per_row=None,
        tokens=None if None in tokens else sum(count or 0 for count in tokens),
        sampled=sum(stage.sampled for stage in stages),
        on_policy=any(stage.on_policy for stage in stages),
        memory=max(memories, key=lambda memory: memory.total, default=None),
    )


# --- tokens -------------------------------------------------------------------------------------


def _lengths(dataset: Dataset, model: str, most: int | None) -> list[int] | None:
    """Tokens of rows from all over the data set, a text of `most` at the most.

    None without a tokenizer on this machine.
    """
    tokenizer = read_tokenizer(model)
    if tokenizer is None:
        return None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    stride = max(len(dataset) // SAMPLED_ROWS, 1)
    rows = [dataset.rows[index] for index in range(0, len(dataset), stride)]
    texts = [list(_texts(row)) for row in rows]
    flat = [text for one in texts for text in one]
    encoded = iter(tokenizer.encode_batch(flat, add_special_tokens=False))
    lengths = []
    for row, one in zip(rows, texts, strict=True):
        written = sum(len(next(encoded).ids) for _ in one) + TURN_TOKENS * _turns(row)
        length = written + len(row.get("input_ids", ()))
        answers = 2 if "rejected" in row else 1
        lengths.append(length if most is None else min(length, answers * most))
    return lengths


def _texts(row: Row) -> Iterator[str]:
    """All that a row says; a prompt twice where two answers to it are trained on."""
    for name in ("text",) if is_text(row) else TEXTS:
        if name in row:
            twice = 2 if name == "prompt" and "rejected" in row else 1
            for _ in range(twice):
                yield from _strings(row[name])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(value.get("content"))
    elif isinstance(value, Sequence):
        for part in value:
            yield from _strings(part)


def _turns(row: Row) -> int:
    return sum(len(row[name]) for name in TEXTS if isinstance(row.get(name), list))


# --- memory -------------------------------------------------------------------------------------


def _memory(spec: ModelSpec, plan: _Plan, tokens: int | None, logit_copies: int) -> Memory | None:
    """Where so many tokens are in the model at a time; None if the model's files do not say it."""
    shapes = weight_shapes(spec.name)
    if tokens is None or shapes is None or file_of(spec.name, "config.json") is None:
        return None
    config = text_config(read_config(spec.name))
    device, dtype = plan.backend["device"], plan.backend["dtype"]
    narrow = dtype == "bfloat16" or (device == "cuda" and dtype == "auto")
    number_bytes = 2 if narrow else 4
    layers, hidden = _first(config, LAYERS), _first(config, HIDDEN)
    vocabulary = _first(config, ("vocab_size",))
    if layers is None or hidden is None or vocabulary is None:
        return None
    kept = layers * LAYER_BYTES * number_bytes // 2
    if plan.params.get("trainer", {}).get("gradient_checkpointing"):
        kept = layers * number_bytes + LAYER_BYTES * number_bytes // 2
    logits = tokens * vocabulary * 4 * logit_copies
    return Memory(
        base=number_bytes * sum(_size(shape) for shape in shapes.values()),
        adapter=ADAPTER_BYTES * adapter_weights(shapes, spec),
        activations=tokens * hidden * kept + logits,
        processes=plan.processes,
    )


def adapter_weights(shapes: Shapes, spec: ModelSpec) -> int:
    """How many weights a LoRA adapter of the spec has: rank * (in + out) for each linear layer.

    With attention and MLP on these are the matrices of the numbered layers, whatever their names.
    """
    names = (ATTENTION if spec.train_attn else ()) + (MLP if spec.train_mlp else ())
    both = spec.train_attn and spec.train_mlp
    chosen: list[tuple[int, ...]] = []
    for name, shape in shapes.items():
        *holders, leaf = name.removesuffix(".weight").split(".")
        in_layer = any(part.isdecimal() for part in holders) and "experts" not in holders
        if name.endswith(".weight") and len(shape) == 2 and in_layer and (both or leaf in names):
            chosen.append(shape)
    if spec.train_unembed:
        heads = [name for name in shapes if name.endswith("lm_head.weight")]
        tied = [name for name in shapes if name.endswith("embed_tokens.weight")]
        chosen += [shapes[name] for name in (heads or tied)[:1]]
    return spec.lora_rank * sum(map(sum, chosen))


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """The number under the first of these names; None if there is none of them."""
    return next((int(config[name]) for name in names if config.get(name) is not None), None)


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
