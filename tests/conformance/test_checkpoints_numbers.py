"""Saving and going on: the same bits as a run that never stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors.torch import load_file
from tinker import types

from tests.backends.engine.engine_process import engine
from tests.conformance.bench import BASE, Bench, data, model_input, train
from tests.conformance.reference import ADAPTER, MODEL, OPTIMIZER, assert_same_bits, ragged

pytestmark = pytest.mark.filterwarnings("ignore:DEPRECATED:FutureWarning")

SAMPLED = types.SamplingParams(max_tokens=12, seed=21, stop=[])
RESUME = {
    "create_training_client_from_state_with_optimizer": lambda bench, client, path: bench.resumed(
        path, optimizer=True
    ),
    "in a new session": lambda bench, client, path: Bench(bench.url, bench.store).resumed(
        path, optimizer=True
    ),
    "load_state_with_optimizer": lambda bench, client, path: _loaded(client, path),
}


def _loaded(client: tinker.TrainingClient, path: str) -> tinker.TrainingClient:
    """The same client, after a step astray that loading has to undo, gradients included."""
    train(client, range(990, 991))
    client.forward_backward(data(ragged(991)), "cross_entropy")
    client.load_state_with_optimizer(path).result()
    return client


@pytest.fixture(scope="module")
def whole(bench: Bench) -> tuple[list[float], Path]:
    """A run of six steps that never stops: its losses and where it ends."""
    client = bench.client(rank=4, seed=12)
    return train(client, range(6)), bench.saved(client)


@pytest.mark.parametrize("way", RESUME)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    bench: Bench,
    whole: tuple[list[float], Path],
    way: str,
) -> None:
    resume: Callable[..., tinker.TrainingClient] = RESUME[way]
    client = bench.client(rank=4, seed=12)
    losses = train(client, range(3))
    resumed = resume(bench, client, client.save_state("half").result().path)
    losses += train(resumed, range(3, 6))
    assert losses == whole[0]
    assert_same_bits(bench.saved(resumed), whole[1])


def test_saving_changes_nothing(bench: Bench, whole: tuple[list[float], Path]) -> None:
    client = bench.client(rank=4, seed=12)
    losses = []
    for step in range(6):
        losses += train(client, range(step, step + 1))
        client.save_state(f"step-{step}")
        client.save_weights_for_sampler(f"step-{step}")
    assert losses == whole[0]
    assert_same_bits(bench.saved(client), whole[1])


def test_a_save_between_pass_and_step_keeps_the_gradients(
    bench: Bench, whole: tuple[list[float], Path]
) -> None:
    client = bench.client(rank=4, seed=12)
    adam = types.AdamParams(learning_rate=1e-2, weight_decay=0.1)
    for step in range(6):
        client.forward_backward(data(ragged(step)), "cross_entropy")
        client.save_state(f"between-{step}")
        client.optim_step(adam).result()
    assert_same_bits(bench.saved(client), whole[1])


@pytest.mark.parametrize("in_place", [False, True], ids=["create", "load_state"])
def test_without_the_optimizer_its_moments_start_new(
    bench: Bench, far: str, in_place: bool
) -> None:
    if in_place:
        client = bench.client()
        client.load_state(far).result()
    else:
        client = bench.resumed(far)
    folder = bench.saved(client)
    ours, theirs = load_file(folder / ADAPTER), load_file(bench.folder(far) / ADAPTER)
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert not any(moment.any() for moment in load_file(folder / OPTIMIZER).values())
    kept = load_file(bench.saved(bench.resumed(far, optimizer=True)) / OPTIMIZER)
    assert all(moment.any() for name, moment in kept.items() if name.endswith("lora_B.exp_avg"))


def test_the_learning_goes_on_from_an_adapter_saved_for_sampling(bench: Bench, far: str) -> None:
    """It holds weights only, so it can be started from without the optimizer and not with it."""
    path = bench.resumed(far).save_weights_for_sampler("adapter-only").result().path
    weights = bench.weights(bench.resumed(path))
    expected = load_file(bench.folder(far) / ADAPTER)
    assert all((weights[name] == expected[name]).all() for name in expected)
    with pytest.raises(tinker.RequestFailedError, match="optimizer"):
        bench.resumed(path, optimizer=True)


def test_after_a_restart_runs_and_samples_go_on_with_the_same_bits(
    bench: Bench, whole: tuple[list[float], Path], tmp_path: Path
) -> None:
    """Another engine starts on what the store holds at this moment, as after a kill -9."""
    prompt = model_input([17, 40, 99])
    lost = bench.client(rank=4, seed=12)
    losses = train(lost, range(3))
    state = lost.save_state("half").result().path
    sampler = lost.save_weights_for_sampler("half").result().path
    drawn = _drawn(bench, sampler, prompt)
    shutil.copytree(bench.store, tmp_path / "store")
    with engine(MODEL, tmp_path / "store", log=tmp_path / "log") as second:
        second.wait_ready()
        after = Bench(second.url, tmp_path / "store")
        client = after.resumed(state, optimizer=True)
        losses += train(client, range(3, 6))
        assert losses == whole[0]
        assert_same_bits(after.saved(client), whole[1])
        assert _drawn(after, sampler, prompt) == drawn
        after.service.close("success").result()


def _drawn(bench: Bench, path: str, prompt: types.ModelInput) -> list[list[float]]:
    """Tokens and logprobs from a saved adapter and from the base model."""
    found: list[list[float]] = []
    for client in (
        bench.service.create_sampling_client(model_path=path).result(),
        bench.service.create_sampling_client(base_model=BASE).result(),
    ):
        for sequence in client.sample(prompt, 2, SAMPLED).result().sequences:
            found += [sequence.tokens, np.asarray(sequence.logprobs).tolist()]
    return found
