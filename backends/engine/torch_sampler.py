"""Sampling with a key-value cache, batched over requests, for one sampler after the other.

Sequences are rows of a cache that is aligned on the left: a row of length n holds positions
0 … n-1, whatever the others hold. A row that is done gives its place to the last one at once, and
waiting rows take free places as they come up, so no step is spent on finished sequences. A prompt
that several samples share is computed once.

Every sample draws from a random stream of its own (seed and sample index), one number a token, so
it does not depend on the batch it rode in, beyond the rounding of the logits.

Shapes: B rows in the cache, V vocabulary, P prompt tokens, C places for positions, D head size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from backends.engine.decoder import KeysValues
from backends.engine.lora import Adapter
from backends.engine.records import (
    FloatArray,
    IntArray,
    RequestError,
    SampledSequence,
    SampleOutput,
    SampleRequest,
    SamplingParams,
)
from backends.engine.torch_model import FrozenModel, micro_batches

_NOISE_BLOCK = 64
_FIRST_PLACES = 64
"""Places for new positions that a row gets at first; the cache doubles as it fills."""


class TorchSampler:
    """Draws continuations from adapters on one base model."""

    def __init__(self, base: FrozenModel, *, max_rows: int, prefill_tokens: int) -> None:
        self._base = base
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens

    def sample(
        self, batch: Sequence[SampleRequest], samplers: Mapping[str, Adapter]
    ) -> dict[str, SampleOutput | RequestError]:
        """Answer every request, by request id; a bad one fails alone."""
        answers: dict[str, SampleOutput | RequestError] = {}
        groups: dict[str | None, list[SampleRequest]] = {}
        for request in batch:
            problem = check_sample(
                request, vocab_size=self._base.vocab_size, max_length=self._base.max_length
            )
            if problem:
                answers[request.request_id] = RequestError(problem)
            elif request.sampler_id is not None and request.sampler_id not in samplers:
                gone = f"no sampler {request.sampler_id} is held here"
                answers[request.request_id] = RequestError(gone, category="server")
            else:
                groups.setdefault(request.sampler_id, []).append(request)
        for sampler_id, requests in groups.items():
            self._base.activate(samplers[sampler_id] if sampler_id is not None else None)
            answers |= self._sample_group(requests)
        return answers

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def _sample_group(self, requests: Sequence[SampleRequest]) -> dict[str, SampleOutput]:
        prompts: dict[bytes, _Prompt] = {}
        rows: list[list[_Row]] = []
        for request in requests:
            tokens = request.prompt.astype(np.int64)
            prompt = prompts.setdefault(tokens.tobytes(), _Prompt(tokens))
            prompt.score |= request.prompt_logprobs
            prompt.top_k = max(prompt.top_k, request.topk_prompt_logprobs)
            stop = _StopRule(request.params, self._base)
            limit = min(request.params.max_tokens, self._base.max_length - request.prompt.size)
            streams = _noise_streams(request)
            rows.append([_Row(prompt, request.params, stop, limit, noise) for noise in streams])
        self._decode([row for group in rows for row in group])
        return {
            request.request_id: _output(request, group)
            for request, group in zip(requests, rows, strict=True)
        }

    def _decode(self, rows: Iterable[_Row]) -> None:
        waiting = deque(rows)
        cache = RowCache(self._base.device)
        running: list[_Row] = []
        draw = _Draw([])
        while waiting or running:
            if waiting and len(running) <= self._max_rows // 2:
                new = [
                    waiting.popleft()
                    for _ in range(min(len(waiting), self._max_rows - len(running)))
                ]
                self._admit(new, cache, running)
                draw = _Draw(running)
            else:
                ids = torch.tensor([row.tokens[-1] for row in running], device=self._base.device)
                logits = self._base.logits(self._step(ids, cache))
                _append(running, draw, logits)
            if any(row.done for row in running):
                _retire(running, cache)
                draw = _Draw(running)

    def _admit(self, new: list[_Row], cache: RowCache, running: list[_Row]) -> None:
        """Compute the new rows' prompts, draw their first tokens, and give them places."""
        by_prompt: dict[int, list[_Row]] = {}
        for row in new:
            by_prompt.setdefault(id(row.prompt), []).append(row)
        groups = list(by_prompt.values())
        lengths = [group[0].prompt.tokens.size for group in groups]
        for indices in micro_batches(lengths, self._prefill_tokens):
            prompts = [groups[index][0].prompt for index in indices]
            filled, last = self._prefill(prompts)
            sizes = torch.tensor([len(groups[index]) for index in indices], device=last.device)
            source = torch.arange(len(indices), device=last.device).repeat_interleave(sizes)
            rows = [row for index in indices for row in groups[index]]
            _append(rows, _Draw(rows), self._base.logits(last).index_select(0, source))
            cache.add(filled, source, [row.prompt.tokens.size for row in rows])
            running.extend(rows)

    def _prefill(self, prompts: Sequence[_Prompt]) -> tuple[list[KeysValues], Tensor]:
        """Keys and values of the prompts a layer, and their last hidden states [B, H]."""
        ids = np.zeros((len(prompts), max(p.tokens.size for p in prompts)), np.int64)
        for row, prompt in zip(ids, prompts, strict=True):
            row[: prompt.tokens.size] = prompt.tokens
        hidden, filled = self._base.decoder.prefill(torch.from_numpy(ids).to(self._base.device))
        for states, prompt in zip(hidden, prompts, strict=True):
            self._score(prompt, states)
        ends = torch.tensor([p.tokens.size - 1 for p in prompts], device=hidden.device)
        return filled, hidden[torch.arange(len(prompts), device=hidden.device), ends]

    def _score(self, prompt: _Prompt, hidden: Tensor) -> None:
        """Fill in the prompt's logprobs [P] and top-k [P, k] where a request asked for them."""
        hidden = hidden[: prompt.tokens.size - 1]
        if prompt.score and prompt.logprobs is None:
            targets = torch.from_numpy(prompt.tokens[1:, None]).to(hidden.device)
            logprobs = self._base.logprobs(hidden, targets)[:, 0].cpu().numpy()
            prompt.logprobs = np.concatenate([np.full(1, np.nan, np.float32), logprobs])
        if prompt.top_k and prompt.top is None:
            values, ids = self._base.top_logprobs(hidden, prompt.top_k)
            nothing = np.full((1, prompt.top_k), np.nan, np.float32)
            prompt.top = (
                np.concatenate([np.zeros_like(nothing, np.int64), ids.cpu().numpy()]),
                np.concatenate([nothing, values.cpu().numpy()]),
            )

    def _step(self, ids: Tensor, cache: RowCache) -> Tensor:
        """One token [B] further in every row; returns hidden states [B, H]."""
        cache.make_room()
        mask = cache.mask(self._base.decoder.window)
        hidden = self._base.decoder.step(ids, cache.lengths, mask, cache.view)
        cache.advance()
        return hidden


class RowCache:
    """Keys and values of the running rows; row i holds `lengths[i]` positions from place 0 on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: list[int] = []
        self._layers: list[_RowLayer] = []
        self.lengths = torch.zeros(0, dtype=torch.int64, device=device)
        """[B], the position that each row's next token takes."""
        self.view = Cache(layers=[])
        """What transformers writes through."""

    def add(self, filled: Sequence[KeysValues], source: Tensor, sizes: Sequence[int]) -> None:
        """Append rows: row j gets the first sizes[j] places of `filled`'s row source[j]."""
        if not self._layers:
            self._layers = [_RowLayer(keys, values) for keys, values in filled]
            self.view = Cache(layers=self._layers)
        start, self._sizes = len(self._sizes), [*self._sizes, *sizes]
        for layer, (keys, values) in zip(self._layers, filled, strict=True):
            layer.reserve(len(self._sizes), max(sizes) + _FIRST_PLACES)
            width = keys.shape[2]
            layer.keys[start : len(self._sizes), :, :width] = keys.index_select(0, source)
            layer.values[start : len(self._sizes), :, :width] = values.index_select(0, source)
        self._sync()

    def keep(self, alive: Sequence[int], holes: Sequence[int], fillers: Sequence[int]) -> None:
        """Shrink to `len(alive)` rows: each hole takes a filler's content; `alive` is the order."""
        if holes:
            to = torch.tensor(holes, device=self._device)
            source = torch.tensor(fillers, device=self._device)
            width = max(self._sizes)
            for layer in self._layers:
                layer.keys[to, :, :width] = layer.keys[source, :, :width]
                layer.values[to, :, :width] = layer.values[source, :, :width]
        self._sizes = [self._sizes[row] for row in alive]
        self._sync()

    def make_room(self) -> None:
        """Have a free place in every row."""
        width = max(self._sizes) + 1
        for layer in self._layers:
            if layer.keys.shape[2] < width:
                layer.reserve(len(self._sizes), 2 * width)

    def advance(self) -> None:
        """Every row has taken one more position."""
        self._sizes = [size + 1 for size in self._sizes]
        self._sync()

    def mask(self, window: int | None) -> dict[str, Tensor | None]:
        """The places [B, 1, 1, W] that each row's next token sees, by kind of layer; None: all."""
        masks: dict[str, Tensor | None] = {"full_attention": None}
        if window is None and min(self._sizes) == max(self._sizes):
            return masks
        places = torch.arange(max(self._sizes) + 1, device=self._device)
        full = (places <= self.lengths[:, None])[:, None, None]
        masks["full_attention"] = full
        if window is not None:
            near = full & (places > self.lengths[:, None] - window)[:, None, None]
            masks["sliding_attention"] = near
        return masks

    def _sync(self) -> None:
        self.lengths = torch.tensor(self._sizes, device=self._device)
        uniform = self._sizes[0] if len(set(self._sizes)) == 1 else None
        for layer in self._layers:
            layer.point_at(self.lengths, uniform, max(self._sizes, default=0))


class _RowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values [rows, heads, C, D], of which the first B rows are in use."""

    is_sliding = False

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys = keys.new_zeros(0, keys.shape[1], 0, keys.shape[3])
        self.values = values.new_zeros(0, values.shape[1], 0, values.shape[3])
        self.is_initialized = True
        self._rows = self._lengths = torch.zeros(0, dtype=torch.int64)
        self._uniform: int | None = None
        self._longest = 0

    def reserve(self, rows: int, places: int) -> None:
        """Grow to at least this size; new places are 0, as masked places must be finite."""
        rows, places = max(rows, self.keys.shape[0]), max(places, self.keys.shape[2])
        for name in ("keys", "values"):
            old = getattr(self, name)
            if old.shape[0] < rows or old.shape[2] < places:
                new = old.new_zeros(rows, old.shape[1], places, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                setattr(self, name, new)

    def point_at(self, lengths: Tensor, uniform: int | None, longest: int) -> None:
        """Where the next token of each row goes: `lengths` [B], all of them `uniform` if set."""
        if len(lengths) != len(self._rows):
            self._rows = torch.arange(len(lengths), device=lengths.device)
        self._lengths, self._uniform, self._longest = lengths, uniform, longest

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write one position [B, heads, 1, D] a row; returns the places in use."""
        rows, width = len(self._rows), self._longest + 1
        if self._uniform is not None:
            self.keys[:rows, :, self._uniform] = key_states[:, :, 0]
            self.values[:rows, :, self._uniform] = value_states[:, :, 0]
        else:
            self.keys[self._rows, :, self._lengths] = key_states[:, :, 0]
            self.values[self._rows, :, self._lengths] = value_states[:, :, 0]
        return self.keys[:rows, :, :width], self.values[:rows, :, :width]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is lazy here."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Width of the keys that `update` returns, and their offset."""
        return self._longest + query_length, 0

    def get_seq_length(self) -> int:
        """Positions in the longest row."""
        return self._longest

    def get_max_length(self) -> int:
        """Rows grow without a limit of their own."""
        return -1


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt of the batch, and what was asked about its own tokens."""

    tokens: IntArray
    score: bool = False
    top_k: int = 0
    logprobs: FloatArray | None = None
    top: tuple[IntArray, FloatArray] | None = None


@dataclass(slots=True, eq=False)
class _Row:
    """One sample while it is drawn."""

    prompt: _Prompt
    params: SamplingParams
    stop: _StopRule
    limit: int
    noise: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False
    _block: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether nothing more is to be drawn."""
        return self.stopped or len(self.tokens) >= self.limit

    def uniform(self) -> float:
        """The next number in [0, 1) of this sample's own stream."""
        if not self._block:
            self._block = self.noise.random(_NOISE_BLOCK)[::-1].tolist()
        return self._block.pop()

    def append(self, token: int, logprob: float) -> None:
        """Take a token in."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = self.stop.completed_by(self.tokens)


class _StopRule:
    """When a sequence ends: at one of some tokens, or once its text holds one of some strings."""

    def __init__(self, params: SamplingParams, base: FrozenModel) -> None:
        self._base = base
        self._strings = params.stop_strings or ()
        self._tokens = frozenset(params.stop_tokens or ())
        if params.stop_strings is None and params.stop_tokens is None:
            self._tokens = base.end_tokens
        self._characters = frozenset("".join(self._strings))
        # A token adds at least a byte of text, bar a few that only mark something.
        self._window = 8 + max((len(string.encode()) for string in self._strings), default=0)

    def completed_by(self, tokens: list[int]) -> bool:
        """Whether the last of the sampled tokens ends the sequence."""
        if tokens[-1] in self._tokens:
            return True
        if not self._strings or not self._may_complete(tokens[-1]):
            return False
        text = self._base.text(tuple(tokens[-self._window :]))
        return any(string in text for string in self._strings)

    def _may_complete(self, token: int) -> bool:
        """False if the token shares no character with the strings, which saves decoding the tail.

        Spaces and parts of characters do not show in the text of a token by itself.
        """
        piece = self._base.piece(token)
        return (
            " " in self._characters or "\ufffd" in piece or not self._characters.isdisjoint(piece)
        )


class _Draw:
    """The settings of the running rows side by side, and how their next tokens are drawn."""

    def __init__(self, rows: Sequence[_Row]) -> None:
        self._rows = rows
        params = [row.params for row in rows]
        self._greedy = np.array([p.temperature == 0 for p in params], bool)
        self._temperature = np.array([max(p.temperature, 1e-30) for p in params], np.float32)
        self._cut = np.flatnonzero([p.top_k > 0 or p.top_p < 1 for p in params])
        cut = [params[index] for index in self._cut]
        self._top_k = np.array([p.top_k if p.top_k > 0 else np.iinfo(np.int64).max for p in cut])
        self._top_p = np.array([p.top_p if p.top_p < 1 else np.inf for p in cut], np.float32)

    def __call__(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B] and their logprobs [B] at temperature 1, without top-k or top-p."""
        device = logits.device
        ids = logits.argmax(-1)
        if not self._greedy.all():
            noise = [0.0 if row.params.temperature == 0 else row.uniform() for row in self._rows]
            scaled = logits - logits.amax(-1, keepdim=True)
            scaled /= torch.from_numpy(self._temperature).to(device)[:, None]
            drawn = _inverse_cdf(self._cut_off(scaled.softmax(-1)), noise)
            ids = torch.where(torch.from_numpy(self._greedy).to(device), ids, drawn)
        return ids, logits.gather(-1, ids[:, None])[:, 0] - logits.logsumexp(-1)

    def _cut_off(self, probs: Tensor) -> Tensor:
        """Zero what top_k, then top_p leave out [B, V]; rows without either stay as they are."""
        if not self._cut.size:
            return probs
        rows = torch.from_numpy(self._cut).to(probs.device)
        top_k, top_p = (
            torch.from_numpy(limit).to(probs.device)[:, None]
            for limit in (self._top_k, self._top_p)
        )
        values, order = probs.index_select(0, rows).sort(dim=-1, descending=True, stable=True)
        values[torch.arange(values.shape[1], device=probs.device) >= top_k] = 0
        values /= values.sum(-1, keepdim=True)
        values[values.cumsum(-1) - values >= top_p] = 0
        return probs.index_copy(0, rows, torch.zeros_like(values).scatter_(-1, order, values))


def _inverse_cdf(probs: Tensor, noise: Sequence[float]) -> Tensor:
    """The token [B] at which each row's cumulative probability passes its number in [0, 1)."""
    precision = torch.float32 if probs.device.type == "mps" else torch.float64
    cumulative = probs.to(precision).cumsum(-1)
    points = torch.tensor(noise, dtype=precision, device=probs.device)[:, None] * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, points, right=True)[:, 0]
    return drawn.clamp_(max=probs.shape[-1] - 1)


def _append(rows: Sequence[_Row], draw: _Draw, logits: Tensor) -> None:
    ids, logprobs = draw(logits)
    for row, token, logprob in zip(rows, ids.tolist(), logprobs.tolist(), strict=True):
        row.append(token, logprob)


def _retire(running: list[_Row], cache: RowCache) -> None:
    """Drop the rows that are done; rows from the end take their places."""
    count = sum(not row.done for row in running)
    holes = [index for index in range(count) if running[index].done]
    fillers = [index for index in range(count, len(running)) if not running[index].done]
    order = list(range(count))
    for hole, filler in zip(holes, fillers, strict=True):
        order[hole] = filler
    cache.keep(order, holes, fillers)
    running[:] = [running[index] for index in order]


def _noise_streams(request: SampleRequest) -> list[np.random.Generator]:
    """One random stream a sample: from (seed, index), or from fresh entropy if there is no seed."""
    seed = request.params.seed
    root = np.random.SeedSequence(None if seed is None else seed % 2**64)
    return [
        np.random.Generator(np.random.PCG64(child)) for child in root.spawn(request.num_samples)
    ]


def _output(request: SampleRequest, rows: Sequence[_Row]) -> SampleOutput:
    prompt = rows[0].prompt
    top_k = request.topk_prompt_logprobs
    top_ids, top_logprobs = prompt.top if prompt.top is not None else (None, None)
    return SampleOutput(
        sequences=tuple(
            SampledSequence(
                tokens=np.array(row.tokens, np.int64),
                logprobs=np.array(row.logprobs, np.float32),
                stop_reason="stop" if row.stopped else "length",
            )
            for row in rows
        ),
        prompt_logprobs=prompt.logprobs if request.prompt_logprobs else None,
        topk_prompt_tokens=top_ids[:, :top_k] if top_k and top_ids is not None else None,
        topk_prompt_logprobs=top_logprobs[:, :top_k]
        if top_k and top_logprobs is not None
        else None,
    )


def check_sample(request: SampleRequest, *, vocab_size: int, max_length: int) -> str | None:
    """A mistake in the request, as `field: what is wrong; what to do`, or None."""
    prompt, params = request.prompt, request.params
    if prompt.ndim != 1 or prompt.size == 0:
        return "prompt: holds no tokens; give at least one"
    if int(prompt.min()) < 0 or int(prompt.max()) >= vocab_size:
        at = int(np.flatnonzero((prompt < 0) | (prompt >= vocab_size))[0])
        return (
            f"prompt: token id {prompt[at]} at position {at} is outside the vocabulary of "
            f"{vocab_size}; encode with this model's tokenizer"
        )
    if prompt.size >= max_length:
        return (
            f"prompt: has {prompt.size} tokens, which leaves no room to sample in a context of "
            f"{max_length}; shorten it"
        )
    limits: Mapping[str, tuple[object, bool, str]] = {
        "num_samples": (request.num_samples, request.num_samples >= 1, "at least 1"),
        "topk_prompt_logprobs": (
            request.topk_prompt_logprobs,
            0 <= request.topk_prompt_logprobs <= vocab_size,
            f"from 0 to {vocab_size}",
        ),
        "max_tokens": (params.max_tokens, params.max_tokens >= 1, "at least 1"),
        "temperature": (
            params.temperature,
            math.isfinite(params.temperature) and params.temperature >= 0,
            "a finite number of at least 0",
        ),
        "top_k": (params.top_k, params.top_k >= -1, "at least 1, or -1 for no limit"),
        "top_p": (params.top_p, 0 < params.top_p <= 1, "above 0 and at most 1"),
        "stop": (params.stop_strings, "" not in (params.stop_strings or ()), "strings of text"),
    }
    for name, (value, good, remedy) in limits.items():
        if not good:
            return f"{name}: is {value}; give {remedy}"
    return None
