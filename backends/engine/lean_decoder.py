"""A lean decoder for the families that most people fine-tune: Llama, Mistral, Qwen2, Qwen3.

It computes what transformers computes, from the same weights, in fewer and larger operations:
projections that read the same input are one matrix, a block's backward pass is written out, LoRA
is part of the projection, and gradients exist for adapters only. On a small model this halves the
cost of a step; the gain shrinks as matrix products grow.

Per layer three functions with a backward pass of their own, and torch's attention between the first
two: x -> queries, keys, values; x + output projection; x + MLP.

Shapes: B rows, T positions, M = B * T, H hidden size, D head size, hq query heads, hk key heads,
I intermediate size, r rank, n projections in a group, O the width of their outputs side by side.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from backends.engine.decoder import KeysValues, layer_kind, sliding_window
from backends.engine.lora import Adapter, LoraSlot
from backends.engine.row_cache import RowCache

MOST_MERGED = 2**24
"""An adapter that is not trained is worked into a copy of the weights if they have no more numbers
(64 MiB). Its own products cost a small model a third of a decoding step, and a large one little.
"""
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose layers are computed here; all else is left to transformers."""
_FIXED_ROPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose angles depend on the position alone."""


class _Part(NamedTuple):
    """One projection's B [out, r], its outputs in O, and its ranks in the group's n * r."""

    b: Tensor
    outputs: slice
    ranks: slice


class _Lora(NamedTuple):
    """An adapter's matrices of a projection: A's stacked to [n r, in], a B a part."""

    a: Tensor
    parts: tuple[_Part, ...]
    scale: float


class _Projection:
    """Linear layers of one input as one matrix, and what the active adapter adds to them."""

    def __init__(self, slots: Mapping[str, LoraSlot], paths: Sequence[str]) -> None:
        """Joins the slots' weights; their own become views, so that nothing is held twice."""
        members = [slots[path] for path in paths]
        self._paths = tuple(paths)
        self._weight = torch.cat([slot.weight for slot in members])
        ends = list(itertools.accumulate(len(slot.weight) for slot in members))
        self._outputs = [slice(*pair) for pair in itertools.pairwise([0, *ends])]
        for slot, outputs in zip(members, self._outputs, strict=True):
            slot.weight = nn.Parameter(self._weight[outputs], requires_grad=False)
        self._bias: Tensor | None = None
        if any(slot.bias is not None for slot in members):
            self._bias = torch.cat([_bias(slot) for slot in members])
        self._used = self._weight
        """The weight, or a copy with the active adapter's part in it."""
        self._lora: _Lora | None = None
        self._gradients: _Lora | None = None

    def activate(self, adapter: Adapter | None, gradients: Adapter | None, *, merge: bool) -> None:
        """Compute with this adapter; backward passes add to `gradients`, which has its layout.

        With `merge` the adapter must not change: it is worked into a copy of the weight.
        """
        self._lora, self._gradients = self._share(adapter), self._share(gradients)
        self._used = self._weight
        if merge and self._lora is not None:
            lora, self._lora = self._lora, None
            self._used = self._weight.clone()
            for part in lora.parts:
                self._used[part.outputs].addmm_(part.b, lora.a[part.ranks], alpha=lora.scale)

    @property
    def size(self) -> int:
        """How many numbers the weight has."""
        return int(self._weight.numel())

    @property
    def trains(self) -> bool:
        """Whether a backward pass has gradients to leave here."""
        return self._gradients is not None

    def _share(self, adapter: Adapter | None) -> _Lora | None:
        if adapter is None:
            return None
        rank = adapter.config.rank
        present = [
            (path, outputs)
            for path, outputs in zip(self._paths, self._outputs, strict=True)
            if path in adapter.matrices
        ]
        if not present:
            return None
        parts = tuple(
            _Part(adapter.matrices[path][1], outputs, slice(index * rank, (index + 1) * rank))
            for index, (path, outputs) in enumerate(present)
        )
        return _Lora(adapter.stacked([path for path, _ in present]), parts, adapter.scale)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """[M, in] to [M, O], plus `residual`; and what A made of x, [M, n r], for `backward`."""
        if residual is None:
            y = functional.linear(x, self._used, self._bias)
        else:
            y = torch.addmm(residual, x, self._used.t())
            y = y if self._bias is None else y.add_(self._bias)
        if self._lora is None:
            return y, None
        inner = x @ self._lora.a.to(x.dtype).t()
        for part in self._lora.parts:
            b = part.b.to(x.dtype)
            y[:, part.outputs].addmm_(inner[:, part.ranks], b.t(), alpha=self._lora.scale)
        return y, inner

    def backward(self, x: Tensor, inner: Tensor | None, dy: Tensor, *, to_x: bool) -> Tensor | None:
        """Adds to the adapter's gradients; returns dx [M, in] if it is wanted."""
        dx = dy @ self._weight if to_x else None
        lora = self._lora
        if lora is None or inner is None:
            return dx
        d_inner = torch.empty_like(inner)
        for index, part in enumerate(lora.parts):
            rows = dy[:, part.outputs]
            torch.mm(rows, part.b.to(dy.dtype), out=d_inner[:, part.ranks])
            if self._gradients is not None:
                db = self._gradients.parts[index].b
                _add_product(db, rows.t(), inner[:, part.ranks], lora.scale)
        if self._gradients is not None:
            _add_product(self._gradients.a, d_inner.t(), x, lora.scale)
        return dx if dx is None else dx.addmm_(d_inner, lora.a.to(dx.dtype), alpha=lora.scale)


def _bias(slot: LoraSlot) -> Tensor:
    return slot.weight.new_zeros(len(slot.weight)) if slot.bias is None else slot.bias


def _add_product(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """total += scale * left @ right, where the total is float32 and the factors may not be."""
    if left.dtype == total.dtype:
        total.addmm_(left, right, alpha=scale)
    else:
        total.add_(left @ right, alpha=scale)


def _norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension (arXiv 1910.07467), and 1 / rms [..., 1] in float32."""
    wide = x.float()
    inverse = torch.linalg.vecdot(wide, wide).unsqueeze(-1).div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).to(x.dtype).mul_(weight), inverse


def _norm_backward(dy: Tensor, x: Tensor, inverse: Tensor, weight: Tensor) -> Tensor:
    """The gradient for x; dy is used up."""
    wide, dy = x.float(), dy.mul_(weight).float()
    along = torch.linalg.vecdot(dy, wide).unsqueeze(-1).mul_(inverse.pow(3)).div_(-x.shape[-1])
    return dy.mul_(inverse).addcmul_(wide, along).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, sign: int) -> None:
    """Rotary embedding (arXiv 2104.09864), or with sign -1 its inverse: [..., heads, D] to `out`.

    `cos` and `sin` [..., 1, D / 2]; the first half of D is paired with the second.
    """
    first, second = x.chunk(2, -1)
    out_first, out_second = out.chunk(2, -1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)


class _Turn(NamedTuple):
    """Where the rows of a pass stand: cos and sin [(B,) T, 1, D / 2] of their positions."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class _Heads:
    """The first half of an attention block: x -> queries, keys, values."""

    norm: Tensor
    eps: float
    project: _Projection
    queries: int
    keys: int
    size: int
    qk_norm: Tensor | None
    """Weights [hq + hk, D] of the norm of queries and keys, where the family has one."""

    def __call__(self, x: Tensor, turn: _Turn) -> tuple[Tensor, Tensor, Tensor, _SavedHeads]:
        """[B, T, H] to [B, T, hq, D] and twice [B, T, hk, D]."""
        rows = x.flatten(0, -2)
        normed, inverse = _norm(rows, self.norm, self.eps)
        y, inner = self.project(normed)
        y = y.view(*x.shape[:-1], -1, self.size)
        turning = self.queries + self.keys
        unturned = y[..., :turning, :]
        raw = qk_inverse = None
        if self.qk_norm is not None:
            raw = unturned
            unturned, qk_inverse = _norm(raw, self.qk_norm, self.eps)
        turned = torch.empty(unturned.shape, dtype=y.dtype, device=y.device)
        _rotate(unturned, turn.cos, turn.sin, turned, 1)
        saved = _SavedHeads(normed, inverse, inner, raw, qk_inverse)
        return (
            turned[..., : self.queries, :],
            turned[..., self.queries :, :],
            y[..., turning:, :],
            saved,
        )

    def backward(
        self, x: Tensor, turn: _Turn, saved: _SavedHeads, grads: Sequence[Tensor], *, to_x: bool
    ) -> Tensor | None:
        """The gradient for x if it is wanted, from those of queries, keys and values."""
        dq, dk, dv = grads
        turning = self.queries + self.keys
        dy = dq.new_empty(*x.shape[:-1], turning + self.keys, self.size)
        dy[..., turning:, :] = dv
        turned = dy[..., :turning, :]
        _rotate(dq, turn.cos, turn.sin, turned[..., : self.queries, :], -1)
        _rotate(dk, turn.cos, turn.sin, turned[..., self.queries :, :], -1)
        if self.qk_norm is not None and saved.raw is not None and saved.qk_inverse is not None:
            turned.copy_(_norm_backward(turned, saved.raw, saved.qk_inverse, self.qk_norm))
        flat = dy.view(saved.normed.shape[0], -1)
        dx = self.project.backward(saved.normed, saved.inner, flat, to_x=to_x)
        if dx is None:
            return None
        return _norm_backward(dx, x.flatten(0, -2), saved.inverse, self.norm).view_as(x)


class _SavedHeads(NamedTuple):
    normed: Tensor
    inverse: Tensor
    inner: Tensor | None
    raw: Tensor | None
    qk_inverse: Tensor | None


@dataclass(frozen=True, slots=True)
class _Mlp:
    """x -> x + down(silu(gate(norm x)) * up(norm x))."""

    norm: Tensor
    eps: float
    project: _Projection
    down: _Projection

    def __call__(self, x: Tensor) -> tuple[Tensor, _SavedMlp]:
        """[M, H] to [M, H]."""
        normed, inverse = _norm(x, self.norm, self.eps)
        y, inner = self.project(normed)
        gate, up = y.chunk(2, -1)
        active = functional.silu(gate).mul_(up)
        out, down_inner = self.down(active, residual=x)
        return out, _SavedMlp(normed, inverse, inner, y, down_inner)

    def backward(self, x: Tensor, saved: _SavedMlp, dout: Tensor, *, to_x: bool) -> Tensor | None:
        """The gradient for x, the residual's included, if it is wanted."""
        gate, up = saved.y.chunk(2, -1)
        active = functional.silu(gate)
        dy = torch.empty_like(saved.y)
        dgate, dup = dy.chunk(2, -1)
        upstream = self.down.backward(active * up, saved.down_inner, dout, to_x=True)
        assert upstream is not None
        torch.mul(upstream, active, out=dup)
        torch.ops.aten.silu_backward.grad_input(upstream.mul_(up), gate, grad_input=dgate)
        dx = self.project.backward(saved.normed, saved.inner, dy, to_x=to_x)
        if dx is None:
            return None
        return _norm_backward(dx, x, saved.inverse, self.norm).add_(dout)


class _SavedMlp(NamedTuple):
    normed: Tensor
    inverse: Tensor
    inner: Tensor | None
    y: Tensor
    down_inner: Tensor | None


# Autograd reaches each block through a function that takes `anchor`, an empty tensor that requires
# a gradient where the block has an adapter: the first block's x, the embeddings, requires none.


class _HeadsFunction(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, anchor: Tensor, heads: _Heads, turn: _Turn
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, saved = heads(x, turn)
        ctx.block, ctx.turn = heads, turn
        ctx.save_for_backward(x, *saved)
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        x, *saved = ctx.saved_tensors
        to_x = ctx.needs_input_grad[0]
        dx = ctx.block.backward(x, ctx.turn, _SavedHeads(*saved), grads, to_x=to_x)
        return dx, None, None, None


class _OutputFunction(torch.autograd.Function):  # type: ignore[misc]
    """x + projection of what attention gave: [M, H], [M, hq D] -> [M, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, attended: Tensor, anchor: Tensor, out: _Projection) -> Tensor:
        y, inner = out(attended, residual=x)
        ctx.block = out
        ctx.save_for_backward(attended, inner)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        attended, inner = ctx.saved_tensors
        (dy,) = grads
        to_x, to_attended = ctx.needs_input_grad[:2]
        d_attended = ctx.block.backward(attended, inner, dy, to_x=to_attended)
        return dy if to_x else None, d_attended, None, None


class _MlpFunction(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, mlp: _Mlp) -> Tensor:
        out, saved = mlp(x)
        ctx.block = mlp
        ctx.save_for_backward(x, *saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        x, *saved = ctx.saved_tensors
        to_x = ctx.needs_input_grad[0]
        return ctx.block.backward(x, _SavedMlp(*saved), grads[0], to_x=to_x), None, None


@dataclass(frozen=True, slots=True)
class _Layer:
    heads: _Heads
    out: _Projection
    mlp: _Mlp
    kind: str
    scale: float
    """What the products of queries and keys are multiplied with."""

    @classmethod
    def of(cls, layer: Any, path: str, kind: str, slots: Mapping[str, LoraSlot]) -> _Layer:
        """Takes over the weights of one of transformers' layers."""
        attention, size = layer.self_attn, layer.self_attn.head_dim
        queries, keys = (
            len(projection.weight) // size for projection in (attention.q_proj, attention.k_proj)
        )
        qk_norm = None
        if hasattr(attention, "q_norm"):
            norms = ((attention.q_norm, queries), (attention.k_norm, keys))
            qk_norm = torch.cat([norm.weight.expand(count, size) for norm, count in norms])

        def project(block: str, *names: str) -> _Projection:
            return _Projection(slots, [f"{path}.{block}.{name}" for name in names])

        heads = _Heads(
            norm=layer.input_layernorm.weight,
            eps=layer.input_layernorm.variance_epsilon,
            project=project("self_attn", "q_proj", "k_proj", "v_proj"),
            queries=queries,
            keys=keys,
            size=size,
            qk_norm=qk_norm,
        )
        feed = _Mlp(
            norm=layer.post_attention_layernorm.weight,
            eps=layer.post_attention_layernorm.variance_epsilon,
            project=project("mlp", "gate_proj", "up_proj"),
            down=project("mlp", "down_proj"),
        )
        return cls(heads, project("self_attn", "o_proj"), feed, kind, attention.scaling)

    def projections(self) -> tuple[_Projection, ...]:
        """All of them."""
        return self.heads.project, self.out, self.mlp.project, self.mlp.down

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool
    ) -> Tensor:
        """[B, hq, T, D] and twice [B, hk, W, D] to [M, hq D]."""
        attended = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=self.scale, enable_gqa=True
        )
        return attended.transpose(1, 2).reshape(-1, q.shape[1] * q.shape[3])


class LeanDecoder:
    """The layers of one base model. It shares the weights with the model it is made from."""

    def __init__(self, backbone: Any, slots: Mapping[str, LoraSlot], path: str) -> None:
        """`path` is the backbone's own among the slots' paths, such as `model`."""
        config = backbone.config
        self.window = sliding_window(config)
        self._embed = backbone.embed_tokens
        self._norm = backbone.norm
        self._rotary = backbone.rotary_emb
        self._layers = [
            _Layer.of(layer, f"{path}.layers.{index}", layer_kind(config, index), slots)
            for index, layer in enumerate(backbone.layers)
        ]
        size = sum(each.size for layer in self._layers for each in layer.projections())
        self._merges = size <= MOST_MERGED and self._embed.weight.dtype == torch.float32
        self._turns: _Turn | None = None
        self._none, self._some = (
            torch.zeros(0, device=self._embed.weight.device, requires_grad=requires)
            for requires in (False, True)
        )

    @staticmethod
    def takes(config: Any) -> bool:
        """Whether a model of this config is one of the families that are computed here."""
        rope = getattr(config, "rope_parameters", None) or {}
        return (
            config.model_type in FAMILIES
            and getattr(config, "hidden_act", None) == "silu"
            and rope.get("rope_type") in _FIXED_ROPES
        )

    def activate(self, adapter: Adapter | None, gradients: Adapter | None) -> None:
        """Compute with this adapter; backward passes add to `gradients`, which has its layout.

        Without `gradients` the adapter must not change while it is active.
        """
        merge = self._merges and gradients is None
        for layer in self._layers:
            for projection in layer.projections():
                projection.activate(adapter, gradients, merge=merge)

    def hidden(self, ids: Tensor) -> Tensor:
        """[B, T] to [B, T, H]."""
        return self._run(ids, None)

    def prefill(self, ids: Tensor) -> tuple[Tensor, list[KeysValues]]:
        """[B, T] to [B, T, H], and keys and values a layer."""
        filled: list[KeysValues] = []
        return self._run(ids, filled), filled

    def step(self, ids: Tensor, cache: RowCache) -> Tensor:
        """[B] to [B, H]."""
        x = self._embed(ids)
        table = self._turn(cache.longest + 1)
        turn = _Turn(table.cos[cache.places], table.sin[cache.places])
        for layer, held in zip(self._layers, cache.layers, strict=True):
            q, k, v, _ = layer.heads(x, turn)
            attended = held.attend(q, k, v, layer.kind, layer.scale)
            x, _ = layer.out(attended, residual=x)
            x, _ = layer.mlp(x)
        return _norm(x, self._norm.weight, self._norm.variance_epsilon)[0]

    def _run(self, ids: Tensor, filled: list[KeysValues] | None) -> Tensor:
        """A causal pass over whole rows; keys and values are put into `filled` if it is given."""
        length = ids.shape[1]
        table = self._turn(length)
        turn = _Turn(table.cos[:length], table.sin[:length])
        x = self._embed(ids)
        near = self._near(length)
        for layer in self._layers:
            anchor = self._anchor(layer.heads.project)
            q, k, v = (
                part.transpose(1, 2) for part in _HeadsFunction.apply(x, anchor, layer.heads, turn)
            )
            if filled is not None:
                filled.append((k, v))
            mask = near if layer.kind == "sliding_attention" else None
            attended = layer.attend(q, k, v, mask, causal=mask is None)
            rows = x.flatten(0, 1)
            rows = _OutputFunction.apply(rows, attended, self._anchor(layer.out), layer.out)
            anchor = self._anchor(layer.mlp.project, layer.mlp.down)
            x = _MlpFunction.apply(rows, anchor, layer.mlp).view_as(x)
        return functional.rms_norm(x, x.shape[-1:], self._norm.weight, self._norm.variance_epsilon)

    def _anchor(self, *projections: _Projection) -> Tensor:
        return self._some if any(each.trains for each in projections) else self._none

    def _near(self, length: int) -> Tensor | None:
        """The mask [T, T] of layers with a window, where it is shorter than the rows."""
        if self.window is None or length <= self.window:
            return None
        ones = torch.ones(length, length, dtype=torch.bool, device=self._none.device)
        return ones.tril().triu(1 - self.window)

    def _turn(self, length: int) -> _Turn:
        """Angles of the first positions, at least `length` of them."""
        if self._turns is None or len(self._turns.cos) < length:
            rows = 1 << max(6, (length - 1).bit_length())
            positions = torch.arange(rows, device=self._none.device)[None]
            cos, sin = self._rotary(self._embed.weight[:1], positions)
            half = cos.shape[-1] // 2
            self._turns = _Turn(cos[0, :, None, :half], sin[0, :, None, :half])
        return self._turns
