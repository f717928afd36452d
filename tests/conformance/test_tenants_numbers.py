"""Clients that share an engine: each has the bits that it would have alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.conformance.bench import BASE, Bench, data, datum, model_input, train
from tests.conformance.reference import assert_same_bits, example, ragged

ADAM = types.AdamParams(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=50.0)
STEPS = range(5)


@pytest.fixture(scope="module")
def solo(bench: Bench) -> tuple[list[float], Path]:
    """A run with nobody else about: its losses and where it ends."""
    client = bench.client(rank=4, seed=30)
    return train(client, STEPS, ADAM), bench.saved(client)


def test_two_clients_step_by_step(bench: Bench, solo: tuple[list[float], Path]) -> None:
    """The other has its own rank, data, rate and weight decay, and shares the base alone."""
    client, other = bench.client(rank=4, seed=30), bench.client(rank=16, seed=31)
    losses = []
    for step in STEPS:
        passed = client.forward_backward(data(ragged(step)), "cross_entropy")
        others = [
            other.forward_backward(data(ragged(500 + step)), "cross_entropy"),
            other.optim_step(types.AdamParams(learning_rate=0.3, weight_decay=0.9)),
        ]
        client.optim_step(ADAM).result()
        losses.append(passed.result().metrics["loss:sum"])
        for future in others:
            future.result()
    assert losses == solo[0]
    assert_same_bits(bench.saved(client), solo[1])


@contextmanager
def crowd(bench: Bench, size: int) -> Iterator[None]:
    """Clients that train, sample and make mistakes for as long as the block runs."""
    stop = Event()

    def tenant(number: int) -> int:
        client = bench.client(rank=2 + number, seed=number)
        rng = np.random.default_rng(number)
        rounds = 0
        while not stop.is_set():
            futures: list[Any] = [
                client.forward_backward(data(ragged(int(rng.integers(10**6)))), "cross_entropy"),
                client.optim_step(types.AdamParams(learning_rate=0.1, weight_decay=1.0)),
            ]
            sampler = client.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=4 + number, stop=[])
            futures.append(sampler.sample(model_input([5, 6, 7 + number]), 2, params))
            for future in futures:
                future.result()
            wrong = datum(example(number, 3).having(weights=np.full(3, np.nan)))
            with pytest.raises(tinker.RequestFailedError):
                client.forward([wrong], "cross_entropy").result()
            rounds += 1
        return rounds

    with ThreadPoolExecutor(size) as pool:
        tenants = [pool.submit(tenant, number) for number in range(size)]
        try:
            yield
        finally:
            stop.set()
        assert all(done.result() > 0 for done in tenants)


def test_a_run_in_a_crowd(bench: Bench, solo: tuple[list[float], Path]) -> None:
    """Seven others train, sample and err meanwhile; passes may ride in one batch with theirs."""
    with crowd(bench, 7):
        client = bench.client(rank=4, seed=30)
        losses = train(client, STEPS, ADAM)
        folder = bench.saved(client)
    assert losses == solo[0]
    assert_same_bits(folder, solo[1])


def test_eight_clients_at_once(bench: Bench) -> None:
    """Every one of them ends where it ends alone."""

    def run(seed: int) -> Path:
        client = bench.client(rank=2 + seed % 3, seed=seed)
        train(client, range(seed, seed + 3), ADAM)
        return bench.saved(client)

    alone = [run(seed) for seed in range(40, 48)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(run, range(40, 48)))
    for left, right in zip(alone, together, strict=True):
        assert_same_bits(left, right)


SHAPE = datum(example(1, 4).having(weights=np.ones(3)))
OVERFLOW = datum(example(1, 4).having(weights=np.full(4, 3e38)))
"""Found out only when it is computed, after the longer ones beside it."""


@pytest.mark.parametrize("bad", [SHAPE, OVERFLOW], ids=["shape", "overflow"])
def test_a_mistake_leaves_no_trace(
    bench: Bench, solo: tuple[list[float], Path], bad: types.Datum
) -> None:
    """A batch with one bad datum fails whole: no gradient of its good ones stays."""
    client = bench.client(rank=4, seed=30)
    losses = []
    good = [example(700 + number, 1000) for number in range(3)]
    for step in STEPS:
        with pytest.raises(tinker.RequestFailedError) as caught:
            client.forward_backward([*data(good), bad], "cross_entropy").result()
        assert caught.value.category == types.RequestErrorCategory.User
        losses += train(client, range(step, step + 1), ADAM)
        good = good[:1]
    assert losses == solo[0]
    assert_same_bits(bench.saved(client), solo[1])


def test_the_base_model_is_never_written_to(bench: Bench, far: str) -> None:
    base = bench.service.create_sampling_client(base_model=BASE).result()
    prompt = model_input(range(20, 60))
    before = base.compute_logprobs(prompt).result()
    train(bench.resumed(far), range(2), types.AdamParams(learning_rate=1.0, weight_decay=1.0))
    assert base.compute_logprobs(prompt).result() == before
