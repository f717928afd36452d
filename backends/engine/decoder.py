"""What runs a base model's layers: hidden states for training and scoring, and decoding by a cache.

Shapes: B rows, T positions of a padded batch, H hidden size, h key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import DynamicCache

from backends.engine.lora import Adapter, LoraSlot

if TYPE_CHECKING:
    from backends.engine.row_cache import RowCache

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

    def step(self, ids: Tensor, cache: RowCache) -> Tensor:
        """Hidden states [B, H] of one more token [B] a row, at the positions `cache.places` [B].

        B is a multiple of `ROW_BLOCK`, and a row's bits must not depend on the other rows.
        """


class TransformersDecoder:
    """Any dense causal decoder, as transformers computes it."""

    def __init__(self, backbone: Any, slots: Mapping[str, LoraSlot]) -> None:
        self._backbone = backbone
        self._slots = slots
        self._by_kind = bool(getattr(backbone.config, "layer_types", None))
        layers = range(backbone.config.num_hidden_layers if self._by_kind else 1)
        self._kinds = sorted({layer_kind(backbone.config, index) for index in layers})
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

    def step(self, ids: Tensor, cache: RowCache) -> Tensor:
        """[B] to [B, H]."""
        masks = {kind: cache.mask(kind) for kind in self._kinds}
        # torch's fused attention gives a row other bits on another thread.
        with sdpa_kernel(SDPBackend.MATH) if cache.exact else nullcontext():
            states: Tensor = self._backbone(
                input_ids=ids[:, None],
                position_ids=cache.places[:, None],
                attention_mask=masks if self._by_kind else masks[self._kinds[0]],
                past_key_values=cache.view,
                use_cache=True,
            ).last_hidden_state
        return states[:, 0]
