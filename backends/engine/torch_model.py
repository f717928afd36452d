"""The frozen base model as the torch backend sees it: token ids in, hidden states and logprobs out.

Shapes: B rows, T positions of a padded batch, H hidden size, V vocabulary, M positions picked out
of a batch, K target candidates a position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from backends.engine.decoder import Decoder, TransformersDecoder
from backends.engine.lean_decoder import LeanDecoder
from backends.engine.lora import Adapter, install_slots
from backends.errors import Problem, UserError, first_line

log = logging.getLogger("flowtune.engine")

LOGITS_AT_ONCE = 2**24
"""How many float32 logits are held at a time (64 MiB); larger batches go through in chunks."""


class FrozenModel:
    """One causal language model whose own weights never change, and the adapter active on it."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype) -> None:
        self.name = name
        self.device = device
        self.dtype = dtype
        model = _load(name, dtype).eval().requires_grad_(False).to(device)
        self._check(model)
        self.slots = install_slots(model)
        self.config = model.config
        self.vocab_size = int(model.get_input_embeddings().weight.shape[0])
        self.max_length = int(self.config.max_position_embeddings)
        self.end_tokens = _token_ids(model.generation_config.eos_token_id)
        self._head = model.get_output_embeddings()
        self._head_path = next(p for p, slot in self.slots.items() if slot is self._head)
        self.decoder = self._decoder(model)
        self._active: tuple[Adapter | None, Adapter | None] = (None, None)
        self._pieces: dict[int, str] = {}

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer that lies beside the weights."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.name)

    def text(self, tokens: tuple[int, ...]) -> str:
        """The tokens' text, special tokens included."""
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def piece(self, token: int) -> str:
        """One token's text; kept, as the same few are asked for again and again."""
        if token not in self._pieces:
            self._pieces[token] = self.text((token,))
        return self._pieces[token]

    def activate(self, adapter: Adapter | None, gradients: Adapter | None = None) -> None:
        """Run the following calls with this adapter, or with the base model alone.

        Backward passes add to `gradients`, which has the adapter's layout.
        """
        if self._active[0] is adapter and self._active[1] is gradients:
            return
        self.decoder.activate(adapter, gradients)
        self._head.activate(adapter, self._head_path)
        self._active = (adapter, gradients)

    def forget(self, adapter: Adapter) -> None:
        """Let go of the adapter's memory if it is the active one."""
        if adapter is self._active[0]:
            self.activate(None)

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [M, V] of hidden states [M, H]."""
        logits: Tensor = self._head(hidden)
        return logits.float()

    def logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Logprobs [M, K] of the targets [M, K] after hidden states [M, H].

        Where M * V is large, chunk by chunk, the backward pass recomputing each chunk's logits.
        """
        rows = max(1, LOGITS_AT_ONCE // self.vocab_size)
        if len(hidden) <= rows:
            return self._logprobs(hidden, targets)
        run: Callable[[Tensor, Tensor], Tensor] = self._logprobs
        if torch.is_grad_enabled():
            run = self._logprobs_again_in_backward
        parts = zip(hidden.split(rows), targets.split(rows), strict=True)
        return torch.cat([run(*part) for part in parts])

    def top_logprobs(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k highest logprobs [M, k] after hidden states [M, H], and their token ids [M, k]."""
        values, ids = [], []
        for part in hidden.split(max(1, LOGITS_AT_ONCE // self.vocab_size)):
            top = self.logits(part).log_softmax(-1).topk(k)
            values.append(top.values)
            ids.append(top.indices)
        return torch.cat(values), torch.cat(ids)

    def _logprobs(self, hidden: Tensor, targets: Tensor) -> Tensor:
        picked: Tensor = _PickedLogprobs.apply(self.logits(hidden), targets)
        return picked

    def _logprobs_again_in_backward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        picked: Tensor = checkpoint(
            self._logprobs, hidden, targets, use_reentrant=False, preserve_rng_state=False
        )
        return picked

    def _decoder(self, model: Any) -> Decoder:
        """The lean decoder where it computes what transformers computes, else transformers."""
        plain = TransformersDecoder(model.base_model, self.slots)
        if not LeanDecoder.takes(self.config):
            return plain
        ids = torch.arange(64, device=self.device).reshape(2, 32) % self.vocab_size
        with torch.no_grad():
            expected = plain.hidden(ids)
            lean = LeanDecoder(model.base_model, self.slots, model.base_model_prefix)
            difference = (lean.hidden(ids) - expected).norm() / expected.norm()
        if difference <= (1e-4 if self.dtype == torch.float32 else 0.05):
            return lean
        log.warning(
            "%s is computed by transformers: the lean decoder is off by %g", self.name, difference
        )
        return plain

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _check(self, model: Any) -> None:
        """Refuse architectures that this engine would compute wrongly."""
        kinds = set(getattr(model.config, "layer_types", None) or ())
        unknown = kinds - {"full_attention", "sliding_attention"}
        ids = torch.arange(8, device=self.device)[None] % model.config.vocab_size
        expected = model(input_ids=ids, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        if unknown or not torch.equal(model.get_output_embeddings()(hidden).float(), expected):
            what = f"has {', '.join(sorted(unknown))} layers" if unknown else "rescales its logits"
            raise UserError(
                Problem(
                    "base_model",
                    f"{self.name} ({model.config.model_type}) {what}, which is not supported",
                    "take a dense decoder such as the Llama, Mistral, Qwen2 or Qwen3 families",
                )
            )


def _load(name: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise UserError(
            Problem(
                "base_model",
                f"{name} cannot be loaded: {first_line(error)}",
                "name a folder or a hub model that holds a causal language model",
            )
        ) from error
    finally:
        if bars:
            logging.enable_progress_bar()


class _PickedLogprobs(torch.autograd.Function):  # type: ignore[misc]
    """log_softmax(logits)[target] without keeping the log-softmax: [M, V], [M, K] -> [M, K]."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """Keeps the logits and their log-sum-exp."""
        total = logits.logsumexp(dim=-1, keepdim=True)
        ctx.save_for_backward(logits, total, targets)
        return logits.gather(-1, targets) - total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """d/dlogits = onehot(target) * g - softmax * sum of g."""
        logits, total, targets = ctx.saved_tensors
        (grad,) = grads
        out = (logits - total).exp_().mul_(-grad.sum(-1, keepdim=True))
        return out.scatter_add_(-1, targets, grad), None


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices grouped longest first, each group's rows * longest within the budget of tokens.

    A group holds at least one row. The grouping depends on the lengths alone.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > budget:
            groups.append([])
        groups[-1].append(index)
    return groups


def _token_ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)
