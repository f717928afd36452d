"""Sampling with a key-value cache: requests join while others run, and leave when they are done.

Each adapter has its own batch of running rows; batches take turns. A row is one sample. Its prompt,
but for the last token, is computed once for all its samples (prefill) and copied to the row's place
in the cache; from the last prompt token on, every step takes all rows one token further and draws.

A sample is the same bits whatever else runs and whenever it came: its noise is its own, and its
numbers never depend on other rows. For that, steps have whole blocks of rows, cached places come in
whole blocks too (see `row_cache`), and prompts share a prefill only if they are padded to one
length, which follows from each one's own. The decoder has to keep to this as well.

Shapes: B rows, V vocabulary, H hidden size, P prompt tokens, T padded prompt tokens.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from backends.engine.drawing import (
    NO_TOP_K,
    Draw,
    Drawn,
    StopRule,
    draw_alternatives,
    entropy_of,
    noise_stream,
)
from backends.engine.lora import Adapter
from backends.engine.records import (
    FloatArray,
    IntArray,
    RequestError,
    SampledSequence,
    SampleOutput,
    SampleRequest,
)
from backends.engine.row_cache import ROW_BLOCK, RowCache
from backends.engine.torch_model import LOGITS_AT_ONCE, FrozenModel

log = logging.getLogger("flowtune.engine")

PROMPT_BLOCK: Final = 16
"""T is a multiple of this, for the same reason in attention."""
TURN_STEPS: Final = 16
"""Steps in a row of one adapter's batch while another's waits."""
MAX_CELLS: Final = 2**25
"""Most numbers of a kind that one request may ask for beside its samples."""
_NOISE_BLOCK: Final = 64
_FIRST_PLACES: Final = 128
"""Most sampled tokens that there is room for at first; it doubles as they come."""

Answer = SampleOutput | RequestError


class TorchSampler:
    """Draws continuations from adapters on one base model."""

    def __init__(self, base: FrozenModel, *, max_rows: int, prefill_tokens: int) -> None:
        self._base = base
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens

    def sample(
        self, batch: Sequence[SampleRequest], samplers: Mapping[str, Adapter]
    ) -> dict[str, Answer]:
        """Answer every request, by request id; a bad one fails alone."""
        answers: dict[str, Answer] = {}
        batches = iter([batch])
        self.serve(lambda: next(batches, ()), answers.__setitem__, samplers)
        return answers

    def serve(
        self,
        arriving: Callable[[], Sequence[SampleRequest]],
        finished: Callable[[str, Answer], None],
        samplers: Mapping[str, Adapter],
    ) -> None:
        """The same for requests that arrive meanwhile; see `AbstractBackend.serve_samples`.

        `samplers` is looked at when a request arrives: it keeps the weights of that moment.
        """
        running: OrderedDict[Adapter | None, _Batch] = OrderedDict()
        steps = 0
        while True:
            for request in arriving():
                problem = self._problem(request, samplers)
                if problem is not None:
                    finished(request.request_id, problem)
                    continue
                adapter = samplers[request.sampler_id] if request.sampler_id is not None else None
                batch = running.get(adapter) or _Batch(self._base, self._prefill_tokens)
                try:
                    batch.add(request)
                except Exception as error:  # its own answer: others run here
                    log.exception("request %s could not be begun", request.request_id)
                    what = RequestError(f"{type(error).__name__}: {error}", category="server")
                    finished(request.request_id, what)
                else:
                    running[adapter] = batch
            if not running:
                return
            adapter, batch = next(iter(running.items()))
            self._base.activate(adapter)
            for request_id, answer in batch.advance(max(1, self._max_rows // len(running))):
                finished(request_id, answer)
            steps += 1
            if batch.empty:
                del running[adapter]
            elif steps % TURN_STEPS == 0:
                running.move_to_end(adapter)

    def _problem(
        self, request: SampleRequest, samplers: Mapping[str, Adapter]
    ) -> RequestError | None:
        base = self._base
        problem = check_sample(request, vocab_size=base.vocab_size, max_length=base.max_length)
        if problem is not None:
            return RequestError(problem)
        if request.sampler_id is not None and request.sampler_id not in samplers:
            return RequestError(f"no sampler {request.sampler_id} is held here", category="server")
        return None


@dataclass(slots=True, eq=False)
class _Request:
    """A request while its samples are drawn, and what was asked about its prompt."""

    record: SampleRequest
    stop: StopRule
    limit: int
    entropy: int
    sequences: dict[int, SampledSequence] = field(default_factory=dict)
    prompt_logprobs: FloatArray | None = None
    top: tuple[IntArray | None, FloatArray | None] = (None, None)
    target_logprobs: FloatArray | None = None
    alternatives: tuple[IntArray | None, FloatArray | None] = (None, None)

    def answer(self) -> Answer:
        """What there is to tell once every sequence is there."""
        if not all(np.isfinite(each.logprobs).all() for each in self.sequences.values()):
            return RequestError(
                "sampling_session_id: its weights give logprobs that are not finite; sample from "
                "an earlier checkpoint, and lower the learning rate"
            )
        return SampleOutput(
            sequences=tuple(self.sequences[index] for index in range(self.record.num_samples)),
            prompt_logprobs=self.prompt_logprobs,
            topk_prompt_tokens=self.top[0],
            topk_prompt_logprobs=self.top[1],
            target_prompt_logprobs=self.target_logprobs,
            prompt_alt_tokens=self.alternatives[0],
            prompt_alt_logprobs=self.alternatives[1],
        )


@dataclass(slots=True, eq=False)
class _Row:
    """One sample while it is drawn; its progress is in `_Slots`."""

    request: _Request
    index: int
    noise: np.random.Generator | None = None
    top: list[tuple[IntArray, FloatArray]] = field(default_factory=list)

    def sequence(self, tokens: IntArray, logprobs: FloatArray, *, stopped: bool) -> SampledSequence:
        """What was drawn."""
        top_ids = top_logprobs = None
        if self.top:
            top_ids, top_logprobs = (np.stack(parts) for parts in zip(*self.top, strict=True))
        return SampledSequence(
            tokens=tokens,
            logprobs=logprobs,
            stop_reason="stop" if stopped else "length",
            topk_tokens=top_ids,
            topk_logprobs=top_logprobs,
        )


class _Batch:
    """The samples of one adapter: those that wait, and the rows that run."""

    def __init__(self, base: FrozenModel, prefill_tokens: int) -> None:
        self._base = base
        self._prefill_tokens = prefill_tokens
        self._waiting: deque[_Row] = deque()
        self._prefills: deque[tuple[int, list[list[_Row]]]] = deque()
        """Those that come next: T, and the rows of each prompt."""
        self._slots = _Slots()
        self._cache = RowCache(base.device, base.decoder.window)
        self._inputs: _Inputs | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing left to draw."""
        return not self._waiting and not self._prefills and not self._slots.running

    def add(self, request: SampleRequest) -> None:
        """Queue a request's samples."""
        limit = min(request.params.max_tokens, self._base.max_length - request.prompt.size)
        stop = StopRule(request.params, self._base)
        own = _Request(request, stop, limit, entropy_of(request.params))
        self._waiting.extend(_Row(own, index) for index in range(request.num_samples))

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def advance(self, most_rows: int) -> list[tuple[str, Answer]]:
        """One prefill, or one step of all rows; returns the requests that are done."""
        try:
            room = most_rows - self._slots.running
            if (
                self._waiting
                and not self._prefills
                and room >= min(len(self._waiting), -(-most_rows // 4))
            ):
                self._plan(room)
            if not self._prefills:
                return self._step()
            self._prefill(*self._prefills[0])
            self._prefills.popleft()
            return []
        except torch.OutOfMemoryError:
            return self._give_up()

    def _plan(self, room: int) -> None:
        """Take rows out of the queue, as prefills of prompts that are padded to one length."""
        by_prompt: dict[bytes, list[_Row]] = {}
        for _ in range(min(room, len(self._waiting))):
            row = self._waiting.popleft()
            by_prompt.setdefault(row.request.record.prompt.tobytes(), []).append(row)
        by_length: dict[int, list[list[_Row]]] = {}
        for rows in by_prompt.values():
            length = padded(rows[0].request.record.prompt.size - 1, self._base.max_length)
            by_length.setdefault(length, []).append(rows)
        for length, groups in sorted(by_length.items()):  # rows of like lengths side by side
            most = max(1, self._prefill_tokens // length)
            for start in range(0, len(groups), most):
                self._prefills.append((length, groups[start : start + most]))

    def _prefill(self, length: int, groups: list[list[_Row]]) -> None:
        """Compute prompts without their last tokens, and give their rows places."""
        ids = np.zeros((len(groups), length), np.int64)
        for padded_ids, group in zip(ids, groups, strict=True):
            prompt = group[0].request.record.prompt
            padded_ids[: prompt.size - 1] = prompt[:-1]
        device = self._base.device
        hidden, filled = self._base.decoder.prefill(torch.from_numpy(ids).to(device))
        rows = [row for group in groups for row in group]
        for group, states in zip(groups, hidden, strict=True):
            for request in (row.request for row in group if row.index == 0):
                self._score(request, states)
        self._cache.reserve(filled, *self._room())
        placed = self._slots.place(rows)
        source = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
        self._cache.fill(
            filled, torch.from_numpy(source).to(device), torch.from_numpy(placed).to(device)
        )
        self._inputs = None

    def _room(self) -> tuple[int, int]:
        """Rows and places that the cache needs with all prefills in it, and for a while after."""
        coming = [row for _, groups in self._prefills for group in groups for row in group]
        rows = max(len(self._slots), self._slots.running + len(coming))
        places = max(
            row.request.record.prompt.size + min(row.request.limit, _FIRST_PLACES) for row in coming
        )
        return whole_blocks(rows), places

    def _score(self, request: _Request, hidden: Tensor) -> None:
        """What was asked about the prompt's own tokens, from hidden states [T, H].

        All of T is computed, so that the bits depend on the prompt alone.
        """
        record, base, count = request.record, self._base, request.record.prompt.size - 1
        if record.prompt_logprobs:
            targets = np.zeros((len(hidden), 1), np.int64)
            targets[:count, 0] = record.prompt[1:]
            logprobs = base.logprobs(hidden, torch.from_numpy(targets).to(hidden.device))
            request.prompt_logprobs = _after_nan(logprobs[:count, 0].cpu().numpy())
        if record.topk_prompt_logprobs:
            values, ids = base.top_logprobs(hidden, record.topk_prompt_logprobs)
            first = np.zeros((1, record.topk_prompt_logprobs), np.int64)
            request.top = (
                np.concatenate([first, ids[:count].cpu().numpy()]),
                _after_nan(values[:count].cpu().numpy()),
            )
        if record.target_prompt_tokens is not None:
            wanted = record.target_prompt_tokens
            targets = np.zeros((len(hidden), wanted.shape[1]), np.int64)
            targets[:count] = np.maximum(wanted, 0)
            logprobs = base.logprobs(hidden, torch.from_numpy(targets).to(hidden.device))
            request.target_logprobs = np.where(wanted < 0, 0, logprobs[:count].cpu().numpy())
        if record.prompt_alt_tokens_k:
            request.alternatives = self._alternatives(request, hidden)

    def _alternatives(self, request: _Request, hidden: Tensor) -> tuple[IntArray, FloatArray]:
        """Tokens drawn in place of the prompt's, and their logprobs, both [P - 1, k]."""
        record, count = request.record, request.record.prompt.size - 1
        noise = np.zeros((len(hidden), record.prompt_alt_tokens_k))
        noise[:count] = noise_stream(request.entropy).random((count, record.prompt_alt_tokens_k))
        rows = max(ROW_BLOCK, LOGITS_AT_ONCE // self._base.vocab_size)
        parts = [
            draw_alternatives(
                self._base.logits(hidden[start : start + rows]),
                record.params.temperature,
                noise[start : start + rows],
            )
            for start in range(0, len(hidden), rows)
        ]
        tokens, logprobs = (np.concatenate(each)[:count] for each in zip(*parts, strict=True))
        return tokens, logprobs

    def _step(self) -> list[tuple[str, Answer]]:
        """Take every row one token further."""
        slots = self._slots
        if self._inputs is None:
            self._inputs = slots.inputs(self._base.device)
        inputs = self._inputs
        self._cache.point_at(inputs.places, slots.places)
        hidden = self._base.decoder.step(inputs.ids, self._cache)
        drawn = inputs.draw(self._base.logits(hidden), slots.noise())
        inputs.ids = drawn.tokens
        inputs.places += inputs.running
        for k, rows in inputs.top.items():
            for slot, *top in zip(rows, *drawn.top(rows, k), strict=True):
                slots.row(slot).top.append((top[0], top[1]))
        ended = slots.append(drawn)
        if not ended:
            return []
        self._inputs = None
        done: list[tuple[str, Answer]] = []
        for row, sequence in ended:
            request = row.request
            request.sequences[row.index] = sequence
            if len(request.sequences) == request.record.num_samples:
                done.append((request.record.request_id, request.answer()))
        self._close_up()
        return done

    def _close_up(self) -> None:
        """Move rows into the places of those that are done, once enough of them are."""
        moves = self._slots.close_up()
        if moves is not None and moves[0].size:
            source, rows = (torch.from_numpy(move).to(self._base.device) for move in moves)
            self._cache.move(source, rows, int(self._slots.places.max()))

    def _give_up(self) -> list[tuple[str, Answer]]:
        """The device is out of memory: let go of all that is here, and say so."""
        error = RequestError(
            "the device ran out of memory while sampling; send shorter or fewer sequences, or have "
            "the engine's sample_rows lowered",
            category="server",
        )
        rows = [*self._waiting, *self._slots.drop()]
        rows += [row for _, groups in self._prefills for group in groups for row in group]
        self._waiting.clear()
        self._prefills.clear()
        self._cache, self._inputs = RowCache(self._base.device, self._base.decoder.window), None
        return [(request_id, error) for request_id in {r.request.record.request_id for r in rows}]


@dataclass(slots=True, eq=False)
class _Inputs:
    """What a step computes from, on the device; made anew when rows come or go."""

    ids: Tensor
    """[B]"""
    places: Tensor
    """[B], each row's position."""
    running: Tensor
    """[B], 1 where there is a sample, 0 in an empty slot."""
    draw: Draw
    top: Mapping[int, Sequence[int]]
    """The rows that want so many of the likeliest tokens."""


_SLOT = np.dtype(
    [
        ("running", bool),
        ("place", np.int64),  # of the token that is fed next
        ("token", np.int64),
        ("count", np.int64),  # of tokens drawn
        ("limit", np.int64),
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("noise", np.float64, (_NOISE_BLOCK,)),
    ]
)


class _Slots:
    """The running rows side by side, as arrays: slot i is row i of the cache.

    Empty slots are computed too, and what comes out is dropped: a token 0 at place 0.
    """

    def __init__(self) -> None:
        self._rows: list[_Row | None] = []
        self._state = np.zeros(0, _SLOT)
        self._stops = np.zeros((0, 1), np.int64)
        """Stop tokens a row, -1 where there are fewer."""
        self._tokens = np.zeros((0, _FIRST_PLACES), np.int64)
        self._logprobs = np.zeros((0, _FIRST_PLACES), np.float32)
        self._with_strings: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def running(self) -> int:
        """How many slots hold a sample."""
        return int(self._state["running"].sum())

    @property
    def places(self) -> IntArray:
        """Each row's next position, [B]."""
        places: IntArray = self._state["place"]
        return places

    def row(self, slot: int) -> _Row:
        """The sample in a slot that is not empty."""
        row = self._rows[slot]
        assert row is not None
        return row

    def place(self, rows: Sequence[_Row]) -> IntArray:
        """Give samples slots, which are returned."""
        missing = len(rows) - len(self._rows) + self.running
        self._resize(len(self._rows) + max(0, missing))
        taken = np.flatnonzero(~self._state["running"])[: len(rows)]
        most = max(row.request.stop.tokens.size for row in rows)
        if most > self._stops.shape[1]:
            more = ((0, 0), (0, most - self._stops.shape[1]))
            self._stops = np.pad(self._stops, more, constant_values=-1)
        for slot, row in zip(taken.tolist(), rows, strict=True):
            self._put(slot, row)
        self._find_strings()
        return taken

    def _put(self, slot: int, row: _Row) -> None:
        self._rows[slot] = row
        record, params, stops = row.request.record, row.request.record.params, row.request.stop
        row.noise = noise_stream(row.request.entropy, row.index)
        self._state[slot] = (
            True,
            record.prompt.size - 1,
            record.prompt[-1],
            0,
            row.request.limit,
            params.temperature,
            params.top_k if params.top_k > 0 else NO_TOP_K,
            params.top_p,
            0,
        )
        self._stops[slot] = -1
        self._stops[slot, : stops.tokens.size] = stops.tokens

    def inputs(self, device: torch.device) -> _Inputs:
        """What the next step computes from."""
        state = self._state
        ids, places, running = (
            torch.from_numpy(state[name].astype(np.int64)).to(device)
            for name in ("token", "place", "running")
        )
        temperature = np.where(state["running"], state["temperature"], 0).astype(np.float32)
        draw = Draw(temperature, state["top_k"], state["top_p"], device)
        top: dict[int, list[int]] = {}
        for slot, row in enumerate(self._rows):
            if row is not None and row.request.record.topk_sample_logprobs:
                top.setdefault(row.request.record.topk_sample_logprobs, []).append(slot)
        return _Inputs(ids, places, running, draw, top)

    def noise(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """The next number of each row's own stream, [B]."""
        at = self._state["count"] % _NOISE_BLOCK
        for slot in np.flatnonzero((at == 0) & self._state["running"]).tolist():
            stream = self.row(slot).noise
            assert stream is not None
            self._state["noise"][slot] = stream.random(_NOISE_BLOCK)
        drawn: np.ndarray[tuple[int], np.dtype[np.float64]] = self._state["noise"][
            np.arange(len(at)), at
        ]
        return drawn

    def append(self, drawn: Drawn) -> list[tuple[_Row, SampledSequence]]:
        """Take a token a row in; returns the samples that are done, whose slots are empty now."""
        # One transfer from the device for both.
        both = torch.stack([drawn.tokens.int(), drawn.logprobs.view(torch.int32)]).cpu().numpy()
        tokens, logprobs = both[0].astype(np.int64), both[1].view(np.float32)
        state, slots = self._state, np.flatnonzero(self._state["running"])
        at = state["count"][slots]
        if int(at.max()) == self._tokens.shape[1]:
            more = ((0, 0), (0, self._tokens.shape[1]))
            self._tokens = np.pad(self._tokens, more)
            self._logprobs = np.pad(self._logprobs, more)
        self._tokens[slots, at], self._logprobs[slots, at] = tokens[slots], logprobs[slots]
        state["count"] += state["running"]
        state["place"] += state["running"]
        state["token"] = tokens
        stopped = (tokens[:, None] == self._stops).any(1)
        for slot in self._with_strings:
            if not stopped[slot]:
                stop, count = self.row(slot).request.stop, int(state["count"][slot])
                tail = self._tokens[slot, max(0, count - stop.window) : count]
                stopped[slot] = stop.completed_by(tail.tolist())
        done = state["running"] & (stopped | (state["count"] >= state["limit"]))
        if not done.any():
            return []
        ended = [
            self._take(slot, stopped=bool(stopped[slot])) for slot in np.flatnonzero(done).tolist()
        ]
        self._find_strings()
        return ended

    def _take(self, slot: int, *, stopped: bool) -> tuple[_Row, SampledSequence]:
        row, count = self.row(slot), int(self._state["count"][slot])
        tokens, logprobs = self._tokens[slot, :count].copy(), self._logprobs[slot, :count].copy()
        self._rows[slot] = None
        self._state[slot] = np.zeros((), _SLOT)
        return row, row.sequence(tokens, logprobs, stopped=stopped)

    def close_up(self) -> tuple[IntArray, IntArray] | None:
        """Give slots up if an eighth of them is empty and not needed to fill a block.

        Returns which rows were moved where, or None if all is as it was.
        """
        running = np.flatnonzero(self._state["running"])
        size = whole_blocks(running.size)
        if size == len(self._rows) or 8 * running.size > 7 * len(self._rows):
            return None
        source = running[running >= size]
        rows = np.flatnonzero(~self._state["running"][:size])[: source.size]
        for array in (self._state, self._stops, self._tokens, self._logprobs):
            array[rows] = array[source]
        for old, new in zip(source.tolist(), rows.tolist(), strict=True):
            self._rows[new] = self._rows[old]
        self._resize(size)
        self._find_strings()
        return source, rows

    def drop(self) -> Iterator[_Row]:
        """Empty every slot; the samples that were in them."""
        rows, self._rows = self._rows, []
        self._resize(0)
        return (row for row in rows if row is not None)

    def _resize(self, slots: int) -> None:
        """Have this many slots, up to a whole block; new ones are empty."""
        slots = whole_blocks(slots)
        self._rows = [*self._rows[:slots], *[None] * (slots - len(self._rows))]
        for name in ("_state", "_stops", "_tokens", "_logprobs"):
            old = getattr(self, name)
            new = np.zeros((slots, *old.shape[1:]), old.dtype)
            kept = min(slots, len(old))
            new[:kept] = old[:kept]
            setattr(self, name, new)

    def _find_strings(self) -> None:
        self._with_strings = [
            slot
            for slot, row in enumerate(self._rows)
            if row is not None and row.request.stop.strings
        ]


def whole_blocks(rows: int) -> int:
    """B for so many rows."""
    return -(-rows // ROW_BLOCK) * ROW_BLOCK


def padded(length: int, most: int) -> int:
    """T for so many tokens: at most a quarter more, and the same for all that share it."""
    block = max(PROMPT_BLOCK, 1 << max(0, (length - 1).bit_length() - 3))
    return min(most, -(-max(1, length) // block) * block)


def _after_nan(rows: FloatArray) -> FloatArray:
    """With a first row that nothing was computed for."""
    return np.concatenate([np.full((1, *rows.shape[1:]), np.nan, np.float32), rows])


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
    return _check_extras(request, vocab_size=vocab_size, max_length=max_length)


def _check_extras(request: SampleRequest, *, vocab_size: int, max_length: int) -> str | None:
    """The same for what is asked beside the samples."""
    prompt = request.prompt.size
    sampled = request.num_samples * min(request.params.max_tokens, max_length - prompt)
    widths: Mapping[str, tuple[int, int, int]] = {
        "topk_prompt_logprobs": (request.topk_prompt_logprobs, vocab_size, prompt),
        "topk_sample_logprobs": (request.topk_sample_logprobs, vocab_size, sampled),
        "prompt_alt_tokens_k": (request.prompt_alt_tokens_k, MAX_CELLS, prompt),
    }
    for name, (k, most, positions) in widths.items():
        if not 0 <= k <= most:
            return f"{name}: is {k}; give from 0 to {most}"
        if k * positions > MAX_CELLS:
            return (
                f"{name}: {k} at {positions} positions are over {MAX_CELLS} numbers; ask for fewer"
            )
    targets = request.target_prompt_tokens
    if targets is None:
        return None
    if targets.ndim != 2 or len(targets) != prompt - 1 or not (targets >= 0).any():
        return (
            f"target_prompt_logprobs: has the shape {list(targets.shape)}; give "
            f"[len(prompt) - 1, K], which is [{prompt - 1}, K], with at least one token id"
        )
    if int(targets.min()) < -1 or int(targets.max()) >= vocab_size:
        bad = targets[(targets < -1) | (targets >= vocab_size)][0]
        return (
            f"target_prompt_logprobs: token id {bad} is outside the vocabulary of {vocab_size}; "
            "give -1 where nothing is wanted"
        )
    return None
