"""A key-value cache of rows of unlike lengths, and attention over it, for decoding rows together.

Rows are aligned on the left: the place of a token is its position, whatever the other rows hold.

A row's result is the same bits whatever the other rows are. So in float32 on a CPU attention is
written out as matrix products here: torch's fused kernel gives a row other bits on another thread.

Shapes: B rows, hq query heads, h key heads, D head size, C places that memory is held for, W places
in use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache, CacheLayerMixin

from backends.engine.decoder import KeysValues
from backends.engine.records import IntArray

ROW_BLOCK: Final = 8
"""B is a multiple of this. Matrix products then give a row the same bits whatever B is: seen with
MKL and up to 32 threads, while 1 to 3 rows, or as many left over to a thread, come out otherwise.
"""
WIDTH_BLOCK: Final = 32
"""W is a multiple of this. Sums over places then run in the same order whatever W is, and masked
places add exact zeros, so a row's bits do not depend on longer rows (seen with MKL from 16 on).
"""
_WORTH_A_CALL: Final = 2**16
"""How many keys' numbers must be saved to attend in one more call."""


class _Segment(NamedTuple):
    """Neighbouring rows of like lengths, so that little is computed for places beyond their end."""

    rows: slice
    width: int


class RowCache:
    """Keys and values of B rows in every layer, and what each row sees."""

    def __init__(self, device: torch.device, window: int | None) -> None:
        self._device = device
        self._window = window
        self.layers: list[RowLayer] = []
        self.view = Cache(layers=[])
        """What transformers writes through."""
        self.places = torch.zeros(0, dtype=torch.int64, device=device)
        """[B], where each row's next token goes: its position."""
        self.longest = 0
        """The highest of them."""
        self._segments: list[_Segment] = []
        self._at: dict[tuple[int, int], Tensor] = {}
        self._masks: dict[tuple[str, int], list[Tensor]] = {}

    def reserve(self, like: Sequence[KeysValues], rows: int, places: int) -> None:
        """Hold memory for at least this many rows and places, and for all places of `like`."""
        if not self.layers:
            self.layers = [RowLayer(self, keys, values) for keys, values in like]
            self.view = Cache(layers=self.layers)
        for layer, (keys, _) in zip(self.layers, like, strict=True):
            layer.reserve(rows, max(places, keys.shape[2]))

    def fill(self, filled: Sequence[KeysValues], source: Tensor, rows: Tensor) -> None:
        """Put `filled`'s row source[j] into row rows[j], from place 0 on; room must be there."""
        places = filled[0][0].shape[2]
        for layer, (keys, values) in zip(self.layers, filled, strict=True):
            layer.keys[rows, :, :places] = keys.index_select(0, source)
            layer.values[rows, :, :places] = values.index_select(0, source)

    def move(self, source: Tensor, rows: Tensor, places: int) -> None:
        """Copy the first `places` of row source[j] to row rows[j]."""
        for layer in self.layers:
            layer.keys[rows, :, :places] = layer.keys[source, :, :places]
            layer.values[rows, :, :places] = layer.values[source, :, :places]

    def point_at(self, places: Tensor, known: IntArray) -> None:
        """The next token of each row goes to `places` [B]; `known` is the same, off the device."""
        self.places, self.longest = places, int(known.max())
        width = _whole(self.longest + 1)
        for layer in self.layers:
            if layer.keys.shape[2] < width:
                layer.reserve(len(known), 2 * width)
        self._segments = [_Segment(slice(0, len(known)), width)]
        if self.exact:
            self._segments = _segments(known, self.layers[0].keys[0, :, 0].numel())
        self._at.clear()
        self._masks.clear()

    @property
    def width(self) -> int:
        """W."""
        return max(segment.width for segment in self._segments)

    @property
    def exact(self) -> bool:
        """Whether attention is computed here, and not by a fused kernel."""
        keys = self.layers[0].keys
        return bool(keys.device.type == "cpu" and keys.dtype == torch.float32)

    @property
    def segments(self) -> Sequence[_Segment]:
        """The rows, in pieces that attention works on."""
        return self._segments

    def at(self, heads: int, room: int) -> Tensor:
        """Where in a layer's [B * h * C] places the next tokens go, [B * h]."""
        if (heads, room) not in self._at:
            starts = torch.arange(len(self.places) * heads, device=self._device) * room
            self._at[heads, room] = (starts.view(-1, heads) + self.places[:, None]).view(-1)
        return self._at[heads, room]

    def masks(self, kind: str, heads: int) -> list[Tensor]:
        """What the next tokens see in layers of a kind, a segment: 0 or -inf, [rows * h, 1, W]."""
        if (kind, heads) not in self._masks:
            seen, dtype = self._seen(kind), self.layers[0].keys.dtype
            mask = torch.full(seen.shape, -torch.inf, dtype=dtype, device=self._device)
            mask = mask.masked_fill_(seen, 0).repeat_interleave(heads, 0)[:, None]
            self._masks[kind, heads] = [
                mask[rows.start * heads : rows.stop * heads, :, :width]
                for rows, width in self._segments
            ]
        return self._masks[kind, heads]

    def mask(self, kind: str) -> Tensor:
        """The same for all rows at once: whether they see it, [B, 1, 1, W]."""
        return self._seen(kind)[:, None, None]

    def _seen(self, kind: str) -> Tensor:
        places = torch.arange(self.width, device=self._device)
        seen = places <= self.places[:, None]
        if kind == "sliding_attention" and self._window is not None:
            seen &= places > self.places[:, None] - self._window
        return seen


def _whole(places: int) -> int:
    return -(-places // WIDTH_BLOCK) * WIDTH_BLOCK


def _segments(places: IntArray, size: int) -> list[_Segment]:
    """Blocks of rows, joined where that costs less than a call; `size`: numbers in a key, h * D."""
    found: list[_Segment] = []
    for block, longest in enumerate(places.reshape(-1, ROW_BLOCK).max(1).tolist()):
        rows, width = slice(block * ROW_BLOCK, (block + 1) * ROW_BLOCK), _whole(longest + 1)
        if found:
            before = found[-1]
            narrow = ROW_BLOCK if width < before.width else rows.start - before.rows.start
            if abs(width - before.width) * narrow * size <= _WORTH_A_CALL:
                rows, width = slice(before.rows.start, rows.stop), max(width, before.width)
                found.pop()
        found.append(_Segment(rows, width))
    return found


class RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values [rows, h, C, D], of which B rows and W places are in use."""

    is_sliding = False

    def __init__(self, cache: RowCache, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self._cache = cache
        self.keys = keys.new_zeros(0, keys.shape[1], 0, keys.shape[3])
        self.values = values.new_zeros(0, values.shape[1], 0, values.shape[3])
        self.is_initialized = True

    def reserve(self, rows: int, places: int) -> None:
        """Grow to at least this size; new places are 0, as masked places must be finite."""
        rows, places = max(rows, self.keys.shape[0]), max(_whole(places), self.keys.shape[2])
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old.shape[0] < rows or old.shape[2] < places:
                new = old.new_zeros(rows, old.shape[1], places, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                setattr(self, name, new)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kind: str, scale: float) -> Tensor:
        """Take one position a row in, k and v [B, h, D], and let q [B, hq, D] see: [B, hq D]."""
        self._write(k, v)
        cache, (_, heads, _, size) = self._cache, self.keys.shape
        q = q.reshape(len(q) * heads, -1, size)
        masks = cache.masks(kind, heads)
        if not cache.exact:
            keys, values = self._places()
            return functional.scaled_dot_product_attention(
                q.view(len(k), heads, -1, size),
                keys,
                values,
                attn_mask=masks[0].view(len(k), heads, 1, -1),
                scale=scale,
            ).reshape(len(k), -1)
        out = torch.empty_like(q)
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        for (rows, width), mask in zip(cache.segments, masks, strict=True):
            part = slice(rows.start * heads, rows.stop * heads)
            past = keys[part, :width].transpose(1, 2)
            weights = torch.baddbmm(mask, q[part], past, alpha=scale).softmax(-1)
            torch.bmm(weights, values[part, :width], out=out[part])
        return out.view(len(k), -1)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take one position a row in, [B, h, 1, D]; returns the places in use, [B, h, W, D]."""
        self._write(key_states, value_states)
        return self._places()

    def _write(self, k: Tensor, v: Tensor) -> None:
        _, heads, room, size = self.keys.shape
        at = self._cache.at(heads, room)
        self.keys.view(-1, size).index_copy_(0, at, k.reshape(-1, size))
        self.values.view(-1, size).index_copy_(0, at, v.reshape(-1, size))

    def _places(self) -> tuple[Tensor, Tensor]:
        rows, width = len(self._cache.places), self._cache.width
        return self.keys[:rows, :, :width], self.values[:rows, :, :width]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is lazy here."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width of the keys that `update` returns, and their offset."""
        return self._cache.width, 0

    def get_seq_length(self) -> int:
        """Positions in the longest row."""
        return self._cache.longest

    def get_max_length(self) -> int:
        """Rows grow without a limit of their own."""
        return -1
