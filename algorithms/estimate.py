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
from algorithms.data.shapes import Row
from algorithms.experiment import Experiment
from algorithms.model_facts import Shapes, file_of, read_config, text_config, weight_shapes
from algorithms.registry import algorithm_class
from backends.base import ModelSpec

SAMPLED_ROWS = 500
TURN_TOKENS = 5
"""What a chat template puts around each turn, about."""
TEXTS = ("prompt", "messages", "completion", "chosen", "rejected")

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj")
MLP = ("gate_proj", "up_proj", "down_proj", "gate_up_proj")
ADAPTER_BYTES = 16
"""Of each adapter weight: itself, its gradient and Adam's two moments, each float32."""
LAYER_BYTES = 34
"""Of each token, layer and hidden unit, kept for the backward pass where numbers have 2 bytes
(Korthikanti et al. 2022, without the attention matrix, which no kernel keeps any more)."""
MICRO_BATCH_TOKENS = {"cpu": 2048, "other": 16384}
"""The embedded engine's own, in one forward and backward pass."""
LOCAL = ("embedded", "local")
"""Backends whose memory is this machine's."""


@dataclass(frozen=True)
class Memory:
    """Bytes that training takes on the device, by what for; sampling's cache comes on top."""

    base: int
    adapter: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
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


def estimate(experiment: Experiment) -> Estimate:
    """Read the rows and work it out. Raises UserError as loading the rows does."""
    dataset = load_dataset(experiment.data)
    section = experiment.algorithm
    on_policy = algorithm_class(section.kind).on_policy
    params = section.params.model_dump()
    per_row = _tokens_per_row(dataset, experiment.model.name)
    steps = _steps(section.params.max_steps, params, len(dataset), per_row)
    substeps = params.get("num_substeps", 1)
    rollouts = params.get("num_samples", 1) if on_policy else 1
    answer = params.get("max_tokens", 0) if on_policy else 0
    seen = steps * params["batch_size"] * rollouts // substeps
    sampled = seen * answer
    tokens = None if per_row is None else round(seen * per_row) + sampled
    budget = params.get("max_tokens_per_batch")
    if budget is not None:
        tokens = None if per_row is None else min(steps * budget, tokens or 0)
    memory = None
    if experiment.backend.kind in LOCAL:
        memory = _memory(experiment.model_spec(), experiment.backend.params.model_dump())
    return Estimate(len(dataset), steps, per_row, tokens, sampled, on_policy, memory)


def _steps(
    max_steps: int | None, params: Mapping[str, Any], rows: int, per_row: float | None
) -> int:
    if max_steps is not None:
        return max_steps
    budget = params.get("max_tokens_per_batch")
    if budget is not None and per_row is not None:
        per_epoch = -(-round(rows * per_row) // budget)
    else:
        per_epoch = -(-rows // params["batch_size"])
    steps: int = per_epoch * params["num_epochs"] * params.get("num_substeps", 1)
    return steps


# --- tokens -------------------------------------------------------------------------------------


def _tokens_per_row(dataset: Dataset, model: str) -> float | None:
    """The mean over rows from all over the data set; None without a tokenizer on this machine."""
    path = file_of(model, "tokenizer.json")
    if path is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    stride = max(len(dataset) // SAMPLED_ROWS, 1)
    rows = [dataset.rows[index] for index in range(0, len(dataset), stride)]
    texts = [list(_texts(row)) for row in rows]
    flat = [text for one in texts for text in one]
    encoded = tokenizer.encode_batch(flat, add_special_tokens=False)
    written = sum(len(one.ids) for one in encoded) + TURN_TOKENS * sum(map(_turns, rows))
    return (written + sum(len(row.get("input_ids", ())) for row in rows)) / len(rows)


def _texts(row: Row) -> Iterator[str]:
    """All that a row says; a prompt twice where two answers to it are trained on."""
    for name in TEXTS:
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


def _memory(spec: ModelSpec, params: Mapping[str, Any]) -> Memory | None:
    shapes = weight_shapes(spec.name)
    if shapes is None or file_of(spec.name, "config.json") is None:
        return None
    config = text_config(read_config(spec.name))
    cuda = params.get("device") == "cuda"
    narrow = params.get("dtype") == "bfloat16" or (cuda and params.get("dtype") == "auto")
    number_bytes = 2 if narrow else 4
    tokens = MICRO_BATCH_TOKENS["other" if params.get("device") in ("cuda", "mps") else "cpu"]
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    activations = tokens * layers * hidden * LAYER_BYTES * number_bytes // 2
    logits = tokens * config["vocab_size"] * 4 * 2  # and their gradient, float32
    return Memory(
        base=number_bytes * sum(_size(shape) for shape in shapes.values()),
        adapter=ADAPTER_BYTES * adapter_weights(shapes, spec),
        activations=activations + logits,
    )


def adapter_weights(shapes: Shapes, spec: ModelSpec) -> int:
    """How many weights a LoRA adapter of the spec has: rank * (in + out) for each linear layer."""
    names = (ATTENTION if spec.train_attn else ()) + (MLP if spec.train_mlp else ())
    chosen: list[tuple[int, ...]] = [
        shape
        for name, shape in shapes.items()
        if name.endswith(".weight") and len(shape) == 2 and name.split(".")[-2] in names
    ]
    if spec.train_unembed:
        heads = [name for name in shapes if name.endswith("lm_head.weight")]
        tied = [name for name in shapes if name.endswith("embed_tokens.weight")]
        chosen += [shapes[name] for name in (heads or tied)[:1]]
    return spec.lora_rank * sum(map(sum, chosen))


def _size(shape: tuple[int, ...]) -> int:
    return math.prod(shape)
