"""The lean decoder against transformers, from which it takes its weights: values and gradients."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from backends.engine.decoder import Decoder, TransformersDecoder
from backends.engine.lean_decoder import LeanDecoder
from backends.engine.lora import Adapter, LoraSlot, TrainState, install_slots
from backends.engine.records import LoraConfig
from backends.engine.row_cache import ROW_BLOCK, RowCache

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
BIASED = {"attention_bias": True, "mlp_bias": True}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama, biases": LlamaConfig(**SIZES, **BIASED),
    "llama, scaled positions": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral, sliding window": MistralConfig(**SIZES, sliding_window=5),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, every other layer sliding": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3, one key head": Qwen3Config(**(SIZES | {"num_key_value_heads": 1})),
}
TRAINED: dict[str, tuple[str, ...] | None] = {
    "every layer": None,
    "two of three siblings": ("q_proj", "v_proj"),
    "the last sibling": ("up_proj",),
    "outputs only": ("o_proj", "down_proj"),
    "the second layer only": ("layers.1.",),
    "nothing below the head": ("lm_head",),
}


def adapter_of(slots: dict[str, LoraSlot], names: tuple[str, ...] | None) -> Adapter:
    """Rank 3 on the layers that hold one of the names, every matrix drawn at random."""
    chosen = {
        path: slot
        for path, slot in slots.items()
        if names is None or any(name in path for name in names)
    }
    adapter = Adapter.zeros(LoraConfig(rank=3), 6.0, chosen, torch.device("cpu"))
    adapter.flat.normal_(std=0.2, generator=torch.Generator().manual_seed(3))
    return adapter


def both(config: PreTrainedConfig) -> Iterator[tuple[Decoder, dict[str, LoraSlot]]]:
    """transformers' decoder and the lean one, of models with the same weights."""
    for lean in (False, True):
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
        for name, vector in model.named_parameters():
            if "norm" in name or "bias" in name:
                vector.add_(torch.linspace(-0.4, 0.4, vector.numel()).view_as(vector))
        slots = install_slots(model)
        if lean:
            yield LeanDecoder(model.base_model, slots, "model"), slots
        else:
            yield TransformersDecoder(model.base_model, slots), slots


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(60, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("family", "trained"),
    [*itertools.product(FAMILIES, ["every layer"]), *itertools.product(["qwen3"], TRAINED)],
)
def test_states_and_gradients_are_those_of_transformers(family: str, trained: str) -> None:
    states, gradients = [], []
    for decoder, slots in both(FAMILIES[family]):
        state = TrainState(adapter_of(slots, TRAINED[trained]))
        decoder.activate(state.adapter, state.pending_matrices)
        hidden = decoder.hidden(tokens(3, 11))
        upstream = torch.linspace(-1, 1, hidden.numel()).view_as(hidden)
        if hidden.requires_grad:
            hidden.backward(upstream)
        states.append(hidden.detach())
        gradients.append(state.pending)
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-5)
    scale = float(gradients[0].abs().max())
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5 * scale)
    assert (scale > 0) == (trained != "nothing below the head")


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()  # type: ignore[untyped-decorator]
def test_decoding_goes_on_where_a_pass_would(family: str) -> None:
    *_, (decoder, slots) = both(FAMILIES[family])
    decoder.activate(adapter_of(slots, None), None)
    ids = tokens(ROW_BLOCK, 12)
    expected = decoder.hidden(ids)
    states, filled = decoder.prefill(ids[:, :8])
    torch.testing.assert_close(states, expected[:, :8])
    rows = torch.arange(ROW_BLOCK)
    cache = RowCache(torch.device("cpu"), decoder.window)
    cache.reserve(filled, ROW_BLOCK, 12)
    cache.fill(filled, rows, rows)
    for place in range(8, 12):
        places = np.full(ROW_BLOCK, place)
        cache.point_at(torch.from_numpy(places), places)
        state = decoder.step(ids[:, place], cache)
        torch.testing.assert_close(state, expected[:, place], rtol=1e-5, atol=1e-5)


def test_weights_are_shared_with_the_model() -> None:
    config = FAMILIES["llama, biases"]
    model = AutoModelForCausalLM.from_config(config)
    slots = install_slots(model)
    LeanDecoder(model.base_model, slots, "model")
    siblings = [slots[f"model.layers.0.self_attn.{letter}_proj"] for letter in "qkv"]
    assert len({slot.weight.untyped_storage().data_ptr() for slot in siblings}) == 1


def test_other_models_are_left_to_transformers() -> None:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert all(LeanDecoder.takes(config) for config in FAMILIES.values())
    for config in (
        GemmaConfig(**SIZES),
        LlamaConfig(**SIZES, hidden_act="gelu"),
        LlamaConfig(**SIZES, rope_parameters=dynamic),
    ):
        assert not LeanDecoder.takes(config)
