"""The rows of the table: what each side does, and what the engine has to reach.

N tokens are trained on by a row [N + 1]; speeds are in useful tokens a second, padding left out.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import tinker
import torch
from tinker import types

from backends.embedded import EmbeddedParams
from benchmarks import models, served
from benchmarks.measuring import (
    Goal,
    Measured,
    Side,
    forget_peak_memory,
    interleaved,
    memory_bytes,
    peak_memory_bytes,
)
from benchmarks.raw import RawModel, Tokens
from benchmarks.served import Served

GB: Final = 1e9
FORWARD_AND_BACKWARD_FLOPS: Final = 4
"""A token's FLOPs by each parameter that it is multiplied with: 2 forward, 2 for the gradient that
goes on to the layer's input. The frozen weights' own gradients (2 more) are not computed; attention
and the adapters are left out."""
LONGEST_OUTPUT: Final = 128
SEEDS_TRIED: Final = 4


@dataclass(frozen=True)
class Steps:
    """Training steps on one even batch."""

    rows: int
    length: int
    steps: int


@dataclass(frozen=True)
class Sizes:
    """How much work a repeat is."""

    middle: Steps = Steps(16, 128, 12)
    large: Steps = Steps(64, 128, 4)
    small: Steps = Steps(4, 32, 60)
    rows: int = 64
    """Of the ragged batches, training and sampling."""
    ragged_steps: int = 2
    lengths: tuple[int, int] = (16, 512)
    prompts: tuple[int, int] = (16, 128)
    outputs: tuple[int, int] = (8, LONGEST_OUTPUT)
    shared_prompt: int = 256
    samples: int = 16
    sample_tokens: int = 64
    clients: int = 8
    of_each_client: Steps = Steps(16, 128, 4)
    vocabulary: int = 151_936
    vocabulary_batch: tuple[int, int] = (8, 1024)


TOY: Final = Sizes(
    middle=Steps(2, 16, 1),
    large=Steps(4, 16, 1),
    small=Steps(1, 4, 2),
    rows=4,
    ragged_steps=1,
    lengths=(4, 16),
    prompts=(2, 8),
    outputs=(2, 8),
    shared_prompt=8,
    samples=4,
    sample_tokens=4,
    clients=2,
    of_each_client=Steps(2, 16, 1),
    vocabulary=2048,
    vocabulary_batch=(2, 64),
)
"""Enough to see that everything runs; no figure of it means anything."""


@dataclass
class Bench:
    """What the rows share: one raw model, one engine, and how much to do."""

    raw: RawModel
    engine: Served
    params: EmbeddedParams
    model: str
    device: str
    sizes: Sizes
    repeats: int
    flops: float | None
    """The card's rate in matrix products, if there is a card."""

    def tokens(self, lengths: Sequence[int], seed: int = 0) -> list[Tokens]:
        """Random token ids, as many as are asked for a row."""
        noise = np.random.default_rng(seed)
        return [noise.integers(3, self.raw.vocabulary, length) for length in lengths]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    what: str
    against: str
    goal: Goal
    measure: Callable[[Bench], Awaitable[Measured]]


# -- training ----------------------------------------------------------------------------------


async def _train_middle(bench: Bench) -> Measured:
    return await _train_even(bench, bench.sizes.middle)


async def _train_large(bench: Bench) -> Measured:
    return await _train_even(bench, bench.sizes.large)


async def _train_small(bench: Bench) -> Measured:
    return await _train_even(bench, bench.sizes.small)


async def _train_even(bench: Bench, work: Steps) -> Measured:
    return await _training(bench, [work.length] * work.rows, work.steps)


async def _train_ragged(bench: Bench) -> Measured:
    low, high = bench.sizes.lengths
    lengths = np.random.default_rng(1).integers(low, high + 1, bench.sizes.rows)
    return await _training(bench, lengths.tolist(), bench.sizes.ragged_steps)


async def _training(bench: Bench, lengths: Sequence[int], steps: int) -> Measured:
    """The same steps on both sides; the losses of the first ones have to agree."""
    rows = bench.tokens([length + 1 for length in lengths])
    data = served.datums(rows)
    client = await bench.engine.client()
    tokens = sum(lengths) * steps
    losses: dict[str, float] = {}

    async def raw() -> int:
        loss = bench.raw.train(rows, steps)
        losses.setdefault("raw", loss)
        return tokens

    async def engine() -> int:
        loss = await served.train(client, data, steps)
        losses.setdefault("engine", loss)
        return tokens

    bench.raw.fresh()
    measured = await interleaved(Side(raw), Side(engine), bench.repeats)
    tolerance = 1e-4 if bench.device == "cpu" else 2e-2
    if not math.isclose(losses["raw"], losses["engine"], rel_tol=tolerance):
        raise RuntimeError(f"the two sides did different work: their first losses are {losses}")
    return _with_utilisation(bench, measured)


def _with_utilisation(bench: Bench, measured: Measured) -> Measured:
    if bench.flops is None:
        return measured
    per_token = FORWARD_AND_BACKWARD_FLOPS * bench.raw.matmul_parameters
    raw, engine = (
        f"{statistics.median(speeds) * per_token / bench.flops:.1%}"
        for speeds in (measured.raw, measured.engine)
    )
    note = f"model FLOP utilisation: raw {raw}, engine {engine}"
    return Measured(measured.engine, measured.raw, note)


async def _clients(bench: Bench) -> Measured:
    """The same steps in all, by one client (the raw side) and by several, each with its model."""
    count, work = bench.sizes.clients, bench.sizes.of_each_client
    data = served.datums(bench.tokens([work.length + 1] * work.rows))
    alone = await bench.engine.client()
    several = await asyncio.gather(*(bench.engine.client() for _ in range(count)))
    tokens = work.rows * work.length * work.steps * count

    async def one() -> int:
        await served.train(alone, data, work.steps * count)
        return tokens

    async def all_of_them() -> int:
        await asyncio.gather(*(served.train(client, data, work.steps) for client in several))
        return tokens

    return await interleaved(Side(one), Side(all_of_them), bench.repeats)


# -- sampling ----------------------------------------------------------------------------------


async def _sampler(bench: Bench) -> tinker.SamplingClient:
    """Of an adapter that has been trained a little, as on the raw side."""
    rows = bench.tokens([17, 33])
    bench.raw.fresh()
    bench.raw.train(rows, 1)
    client = await bench.engine.client()
    await served.train(client, served.datums(rows), 1)
    sampler: tinker.SamplingClient = await client.save_weights_and_get_sampling_client()
    return sampler


async def _sample_ragged(bench: Bench) -> Measured:
    """Outputs end at a token given as stop; on the raw side after as many tokens."""
    sizes = bench.sizes
    sampler = await _sampler(bench)
    noise = np.random.default_rng(2)
    low, high = sizes.prompts
    prompts = bench.tokens(noise.integers(low, high + 1, sizes.rows).tolist())
    low, high = sizes.outputs
    wanted = noise.integers(low, high + 1, sizes.rows).tolist()
    params, ends = await _stops(sampler, prompts, wanted, low, high)
    return await _sampling(bench, sampler, prompts, params, ends)


async def _stops(
    sampler: tinker.SamplingClient,
    prompts: Sequence[Tokens],
    wanted: Sequence[int],
    low: int,
    high: int,
) -> tuple[list[types.SamplingParams], list[int]]:
    """Per prompt a seed and a stop token that end its sample close to the length wanted.

    A token can end a sample of low to high tokens where it stands in it for the first time.
    """
    ends: list[dict[int, types.SamplingParams]] = [{} for _ in prompts]
    for seed in range(SEEDS_TRIED):
        unending = types.SamplingParams(max_tokens=high, temperature=1.0, seed=seed, stop=[])
        drawn = await served.sample(sampler, prompts, [unending] * len(prompts))
        for found, tokens in zip(ends, drawn, strict=True):
            for n in range(low, len(tokens) + 1):
                if tokens[n - 1] not in tokens[: n - 1]:
                    found[n] = unending.model_copy(update={"stop": [tokens[n - 1]]})
    lengths = [
        min(found, key=lambda n: abs(n - goal)) for found, goal in zip(ends, wanted, strict=True)
    ]
    return [found[n] for found, n in zip(ends, lengths, strict=True)], lengths


async def _samples_of_one_prompt(bench: Bench) -> Measured:
    sizes = bench.sizes
    sampler = await _sampler(bench)
    prompts = bench.tokens([sizes.shared_prompt])
    params = [types.SamplingParams(max_tokens=sizes.sample_tokens, temperature=1.0, stop=[])]
    return await _sampling(
        bench, sampler, prompts, params, [sizes.sample_tokens], samples=sizes.samples
    )


async def _sampling(
    bench: Bench,
    sampler: tinker.SamplingClient,
    prompts: Sequence[Tokens],
    params: Sequence[types.SamplingParams],
    lengths: Sequence[int],
    samples: int = 1,
) -> Measured:
    async def raw() -> int:
        return bench.raw.generate(prompts, lengths, samples)

    async def engine() -> int:
        drawn = await served.sample(sampler, prompts, params, samples)
        sizes = [len(tokens) for tokens in drawn]
        expected = [length for length in lengths for _ in range(samples)]
        # On a GPU the bits of a logit, and with them now and then a token, may change with a batch.
        if bench.device == "cpu" and sizes != expected:
            raise RuntimeError(f"samples of {sizes} tokens came instead of {expected}")
        return sum(sizes)

    return await interleaved(
        Side(raw), Side(engine), bench.repeats, f"{sum(lengths) * samples} tokens a repeat"
    )


# -- memory and start --------------------------------------------------------------------------


async def _memory(bench: Bench) -> Measured:
    """A pass over a large vocabulary, at an engine of its own each time."""
    sizes = bench.sizes
    rows, length = sizes.vocabulary_batch
    noise = np.random.default_rng(3)
    batch, small = (
        served.datums([noise.integers(3, sizes.vocabulary, n + 1) for _ in range(count)])
        for count, n in ((rows, length), (1, 8))
    )
    extra = []
    with tempfile.TemporaryDirectory(prefix="flowtune-benchmark-") as folder:
        model = await asyncio.to_thread(models.make, Path(folder), vocab_size=sizes.vocabulary)
        for _ in range(min(bench.repeats, 3)):
            engine = await Served.start(model, bench.params)
            try:
                client = await engine.client()
                await served.train(client, small, 1)
                before = _held(bench.device, engine.pid)
                await client.forward_backward(batch, "cross_entropy")
                extra.append((_most_held(bench.device, engine.pid) - before) / GB)
            finally:
                await engine.stop()
    logits = 4 * rows * length * sizes.vocabulary / GB
    return Measured(tuple(extra), note=f"the batch's float32 logits alone: {logits:.1f} GB")


def _held(device: str, pid: int) -> int:
    """Bytes held now; from here on the most is looked out for."""
    if device == "cuda":
        return _on_the_card()
    forget_peak_memory(pid)
    return memory_bytes(pid)


def _most_held(device: str, pid: int) -> int:
    """On a card torch keeps what it once took, so that what is held now is the most."""
    return _on_the_card() if device == "cuda" else peak_memory_bytes(pid)


def _on_the_card() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


async def _ready(bench: Bench) -> Measured:
    """Seconds from nothing to `healthz`'s 200."""
    seconds = [bench.engine.ready_seconds]
    while len(seconds) < bench.repeats:
        engine = await Served.start(bench.model, bench.params)
        seconds.append(engine.ready_seconds)
        await engine.stop()
    return Measured(tuple(seconds))


_LOOP: Final = "raw loop"
ROWS: Final = (
    Row("train-16x128", "training, 16 x 128, pipelined", _LOOP, Goal("x", 1.0, 1.5), _train_middle),
    Row("train-64x128", "training, 64 x 128, pipelined", _LOOP, Goal("x", 1.0, 1.5), _train_large),
    Row(
        "train-ragged",
        "training, 64 of 16 to 512 tokens",
        "padded raw loop",
        Goal("x", 1.5, 2.5),
        _train_ragged,
    ),
    Row("train-4x32", "training, 4 x 32, pipelined", _LOOP, Goal("x", 0.8, 1.2), _train_small),
    Row(
        "sample-ragged",
        "sampling, 64 prompts, 8 to 128 new",
        "generate, one batch",
        Goal("x", 1.5, 3.0),
        _sample_ragged,
    ),
    Row(
        "sample-16-of-1",
        "16 samples of one prompt",
        "generate",
        Goal("x", 1.5, 3.0),
        _samples_of_one_prompt,
    ),
    Row("clients-8", "8 clients, one base, 16 x 128", "one client", Goal("x", 0.9, 1.0), _clients),
    Row(
        "memory-vocabulary",
        "extra memory, V 151,936, 8 x 1,024",
        "",
        Goal("GB", 1.5, 0.5),
        _memory,
    ),
    Row("ready", "ready after start", "", Goal("s", 10.0, 5.0), _ready),
)
