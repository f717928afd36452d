"""Sampling from a transformers model that lives in this process, between two of its steps.

Requests that are made together are answered together, in batches. A sample depends on its request
alone, up to the rounding of a batch: each has random numbers of its own, so that sampling leaves
the generators that training draws from where they are.

Shapes: R rows of a batch, T positions, V vocabulary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.errors import Problem, UserError

if TYPE_CHECKING:
    import torch
    from tinker import types as tinker_types

ROWS_AT_ONCE = 64
"""Sequences that are decoded together."""

ROWS_SCORED_AT_ONCE = 8
"""Prompts that are scored together: their logits are held at every position."""


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """A prompt that waits for its samples, and whether it is to be scored itself."""

    tokens: list[int]
    num_samples: int
    params: tinker_types.SamplingParams
    scored: bool
    answer: asyncio.Future[tinker_types.SampleResponse]


@dataclass(slots=True, eq=False)
class _Row:
    """One sample that is being drawn."""

    prompt: list[int]
    max_tokens: int
    params: tinker_types.SamplingParams
    stop: frozenset[int]
    draws: np.random.Generator
    tokens: list[int]
    logprobs: list[float]
    ended: str | None = None


class LiveSamplingClient:
    """A `SamplingClient` on the model as it is when a request is answered."""

    def __init__(self, model: Any, eos: int | None, longest: int, adapter: bool = True) -> None:
        """`longest` is the model's context (tokens); without `adapter` the base model answers."""
        self._model = model
        self._eos = eos
        self._longest = longest
        self._adapter = adapter
        self._waiting: list[_Request] = []
        self._serving: asyncio.Task[None] | None = None

    def sample(
        self,
        prompt: tinker_types.ModelInput,
        num_samples: int,
        sampling_params: tinker_types.SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
    ) -> Awaitable[tinker_types.SampleResponse]:
        """Submit a request; stops are tokens only, and there are no top-k prompt logprobs."""
        tokens = list(prompt.to_ints())
        self._check(tokens, sampling_params, topk_prompt_logprobs)
        loop = asyncio.get_running_loop()
        request = _Request(
            tokens, num_samples, sampling_params, include_prompt_logprobs, loop.create_future()
        )
        self._waiting.append(request)
        if self._serving is None or self._serving.done():
            self._serving = loop.create_task(self._serve())
        return request.answer

    def _check(
        self, tokens: list[int], params: tinker_types.SamplingParams, topk_prompt_logprobs: int
    ) -> None:
        if topk_prompt_logprobs:
            what = "gives no top-k logprobs of prompts"
            raise UserError(Problem("backend.kind", f"local {what}", "take embedded for that"))
        if any(isinstance(stop, str) for stop in _stops(params)):
            what = "stops at tokens only, not at strings"
            raise UserError(Problem("backend.kind", f"local {what}", "take embedded for that"))
        if len(tokens) >= self._longest:
            what = f"a prompt of {len(tokens)} tokens, and the model reads {self._longest}"
            raise UserError(Problem("model.name", what, "shorten the rows"))

    async def _serve(self) -> None:
        """Answer what waits, batch by batch, until nothing does."""
        while self._waiting:
            batch: list[_Request] = []
            rows = 0
            while self._waiting and (not batch or rows < ROWS_AT_ONCE):
                rows += self._waiting[0].num_samples
                batch.append(self._waiting.pop(0))
            try:
                answers = await asyncio.to_thread(self._answer, batch)
            except Exception as error:  # noqa: BLE001  (raised where the answers are awaited)
                for request in batch:
                    if not request.answer.done():
                        request.answer.set_exception(error)
                continue
            for request, answer in zip(batch, answers, strict=True):
                if not request.answer.done():
                    request.answer.set_result(answer)

    # -- in a thread ---------------------------------------------------------------------------

    def _answer(self, batch: list[_Request]) -> list[tinker_types.SampleResponse]:
        from tinker import types as tinker_types

        with self._evaluating():
            scored = [request for request in batch if request.scored]
            logprobs = {
                id(request): given
                for start in range(0, len(scored), ROWS_SCORED_AT_ONCE)
                for request, given in self._score(scored[start : start + ROWS_SCORED_AT_ONCE])
            }
            rows = [row for request in batch for row in self._rows(request)]
            for together in _batches(rows, self._longest):
                self._decode(together)
        answers = []
        left = iter(rows)
        for request in batch:
            sequences = [
                tinker_types.SampledSequence(
                    stop_reason="stop" if row.ended == "stop" else "length",
                    sequence_id=str(index),
                    tokens_np=np.asarray(row.tokens, np.int32),
                    logprobs_np=np.asarray(row.logprobs, np.float32),
                )
                for index, row in zip(range(request.num_samples), left, strict=False)
            ]
            answers.append(
                tinker_types.SampleResponse(
                    sequences=sequences, prompt_logprobs_np=logprobs.get(id(request))
                )
            )
        return answers

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """The model without dropout, gradients and routers' logits, and then as it was."""
        import torch

        training = self._model.training
        config = self._model.config.get_text_config()
        routers = getattr(config, "output_router_logits", False)
        if routers:  # with them comes a loss of theirs, for which a cache is no batch
            config.output_router_logits = False
        self._model.eval()
        adapter = nullcontext() if self._adapter else self._model.disable_adapter()
        try:
            with torch.no_grad(), adapter:
                yield
        finally:
            self._model.train(training)
            if routers:
                config.output_router_logits = routers

    def _rows(self, request: _Request) -> Iterator[_Row]:
        params = request.params
        room = self._longest - len(request.tokens)
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        stops = _stops(params)
        if params.stop is None and self._eos is not None:
            stops = [self._eos]
        for index in range(request.num_samples):
            entropy = None if params.seed is None else [params.seed, index]
            draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
            stop = frozenset(int(token) for token in stops)
            yield _Row(request.tokens, limit, params, stop, draws, [], [])

    def _score(self, batch: list[_Request]) -> Iterator[tuple[_Request, np.ndarray[Any, Any]]]:
        """The logprobs of each prompt's tokens [T]; the first has none (NaN)."""
        import torch

        ids, mask, _ = self._padded([request.tokens for request in batch], left=False)
        logits = self._model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for request, row in zip(batch, logits, strict=True):
            targets = torch.tensor(request.tokens[1:], device=row.device)
            logprobs = row[: len(targets)].float().log_softmax(-1)
            picked = logprobs.gather(-1, targets[:, None])[:, 0].cpu().numpy()
            yield request, np.concatenate([[np.nan], picked]).astype(np.float32)

    def _decode(self, rows: list[_Row]) -> None:
        """Draw all tokens of these rows, side by side."""
        import torch

        ids, mask, positions = self._padded([row.prompt for row in rows], left=True)
        cache = None
        while any(row.ended is None for row in rows):
            out = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = getattr(out, "past_key_values", None)
            if cache is None:
                name = self._model.config.model_type
                what = f"{name} models keep no keys and values, and local samples with these only"
                raise UserError(Problem("model.name", what, "leave out what samples from it"))
            logits_R_V = out.logits[:, -1].float()
            logprobs_R_V = logits_R_V.log_softmax(-1)
            picked = _pick(rows, logits_R_V)
            taken = logprobs_R_V.gather(-1, picked.to(ids.device)[:, None])[:, 0].tolist()
            for row, token, logprob in zip(rows, picked.tolist(), taken, strict=True):
                _append(row, token, logprob)
            ids = picked.to(ids.device)[:, None]
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            positions = positions[:, -1:] + 1

    def _padded(
        self, prompts: list[list[int]], left: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, attention mask and positions [R, T] of prompts."""
        import torch

        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            place = slice(longest - len(prompt), None) if left else slice(0, len(prompt))
            ids[row, place] = torch.tensor(prompt)
            mask[row, place] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        device = self._model.device
        return ids.to(device), mask.to(device), positions.to(device)


def _batches(rows: list[_Row], longest: int) -> Iterator[list[_Row]]:
    """Rows to be decoded together, which take no more places side by side than the model has.

    A row that has ended takes places until all have, and one with a short prompt those of the
    longest.
    """
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: len(row.prompt)):
        places = len(row.prompt) + max(other.max_tokens for other in [*batch, row])
        if len(batch) == ROWS_AT_ONCE or (batch and places > longest):
            yield batch
            batch = []
        batch.append(row)
    yield batch


def _stops(params: tinker_types.SamplingParams) -> list[Any]:
    stop = params.stop
    return [stop] if isinstance(stop, str) else list(stop or ())


def _append(row: _Row, token: int, logprob: float) -> None:
    """Take a token into a row that has not ended; the stop token is part of it."""
    if row.ended is not None:
        return
    row.tokens.append(token)
    row.logprobs.append(logprob)
    if token in row.stop:
        row.ended = "stop"
    elif len(row.tokens) >= row.max_tokens:
        row.ended = "length"


def _pick(rows: list[_Row], logits_R_V: torch.Tensor) -> torch.Tensor:
    """The next token of each row [R], by its temperature, top_k and top_p."""
    picked = logits_R_V.argmax(-1).cpu()
    for index, row in enumerate(rows):
        if row.params.temperature > 0 and row.ended is None:
            picked[index] = _draw(row, logits_R_V[index])
    return picked


def _draw(row: _Row, logits_V: torch.Tensor) -> int:
    """A token by inverse CDF, likeliest first, from the row's own random numbers."""
    params = row.params
    probs_V = (logits_V.double() / params.temperature).softmax(-1).cpu().numpy()
    order = np.argsort(-probs_V, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    total = np.cumsum(probs_V[order])
    if params.top_p < 1:
        order = order[: int(np.searchsorted(total, params.top_p * total[-1])) + 1]
        total = total[: len(order)]
    place = int(np.searchsorted(total, row.draws.random() * total[-1], side="right"))
    return int(order[min(place, len(order) - 1)])
