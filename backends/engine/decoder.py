"""What runs a base model's layers: hidden states for training and scoring, and decoding by a cache.

Shapes: B rows, T positions of a padded batch, H hidden size, h key heads, D head size, W places of
a cache in use.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from backends.engine.lora import Adapter, LoraSlot

KeysValues = tuple[Tensor, Tensor]
"""One layer's keys and values, both [B, h, T, D]."""


def sliding_window(config: Any) -> int | None:
    """How many positions the layers of kind sliding_attention see; None if there are none."""
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    return window if window and (not kinds or "sliding_attention" in kinds) else None


def layer_kind(config: Any, index: int) -> str:
    """full_attention or sliding_attention."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        return str(kinds[index])
    return "full_attention" if sliding_window(config) is None else "sliding_attention"


class Decoder(Protocol):
    """The layers of one base model, under the adapter that is active."""

    window: int | None
    """How many positions the layers of kind sliding_attention see; None if there are none."""

    def activate(self, adapter: Adapter | None, gradients: Adapter | None) -> None:
        """Compute with this adapter, or the base model alone.

        A backward pass adds to `gradients`, which has the adapter's layout.
        """

    def hidden(self, ids: Tensor) -> Tensor:
        """Last hidden states [B, T, H] of token ids [B, T] padded on the right (or not at all).

        Attention is causal, so what stands right of a row's end never reaches the row: no mask.
        """

    def prefill(self, ids: Tensor) -> tuple[Tensor, list[KeysValues]]:
        """The same, and each layer's keys and values [B, h, T, D]."""

    def step(
        self, ids: Tensor, positions: Tensor, mask: dict[str, Tensor | None], cache: Cache
    ) -> Tensor:
        """Hidden states [B, H] of one more token [B] a row, at `positions` [B].

        `mask[kind]` [B, 1, 1, W] says which places the layers of a kind see; None: all of them.
        `cache.layers[i].update(keys, values)` takes one position [B, h, 1, D] a row and returns
        the W places in use, [B, h, W, D] each.
        """


class TransformersDecoder:
    """Any dense causal decoder, as transformers computes it."""

    def __init__(self, backbone: Any, slots: Mapping[str, LoraSlot]) -> None:
        self._backbone = backbone
        self._slots = slots
        self._by_kind = bool(getattr(backbone.config, "layer_types", None))
        self.window = sliding_window(backbone.config)

    def activate(self, adapter: Adapter | None, gradients: Adapter | None) -> None:
        """Point the slots at this adapter; autograd adds to its matrices' `grad`."""
        for path, slot in self._slots.items():
            slot.activate(adapter, path)

    def hidden(self, ids: Tensor) -> Tensor:
        """[B, T] to [B, T, H]."""
        states: Tensor = self._backbone(input_ids=ids, use_cache=False).last_hidden_state
        return states

    def prefill(self, ids: Tensor) -> tuple[Tensor, list[KeysValues]]:
        """[B, T] to [B, T, H], and keys and values a layer."""
        filled = DynamicCache()
        states: Tensor = self._backbone(
            input_ids=ids, past_key_values=filled, use_cache=True
        ).last_hidden_state
        return states, [(layer.keys, layer.values) for layer in filled.layers]

    def step(
        self, ids: Tensor, positions: Tensor, mask: dict[str, Tensor | None], cache: Cache
    ) -> Tensor:
        """[B] to [B, H]."""
        alone = mask[layer_kind(self._backbone.config, 0)]
        states: Tensor = self._backbone(
            input_ids=ids[:, None],
            position_ids=positions[:, None],
            attention_mask=mask if self._by_kind else alone,
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        return states[:, 0]
