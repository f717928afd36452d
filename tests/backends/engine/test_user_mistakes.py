"""Locks: a user's mistake comes back at once, as one, and says what is wrong and where.

Through the real SDK. After each mistake the same client trains on, and gives the bits of a client
that never made one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from backend_contract import CONTEXT, VOCAB
from engine_process import KEY, EngineProcess
from tinker import types

AT_ONCE_SECONDS = 2.0
"""The SDK's first repeat would come after one second, and a held request after 25."""
ADAM = types.AdamParams(learning_rate=1e-2)


@dataclass
class Tenants:
    """Two clients with the same adapter: one makes mistakes, the other does not."""

    service: tinker.ServiceClient
    base: str
    client: tinker.TrainingClient
    careful: tinker.TrainingClient
    sampler: Any
    steps: int = 0

    def both_train_on(self) -> None:
        """One more step for each; they have to see the same bits."""
        self.steps += 1
        seen = []
        for client in (self.client, self.careful):
            passed = client.forward_backward(good(self.steps), "cross_entropy")
            client.optim_step(ADAM).result()
            outputs = passed.result().loss_fn_outputs
            seen.append([row["logprobs"].to_numpy().tobytes() for row in outputs])
        assert seen[0] == seen[1]


@pytest.fixture(scope="module")
def tenants(shared_engine: EngineProcess, engine_home: Path) -> Iterator[Tenants]:
    base = str(engine_home / "base")
    services = [tinker.ServiceClient(base_url=shared_engine.url, api_key=KEY) for _ in range(2)]
    clients = [
        service.create_lora_training_client(base, rank=4, seed=9).result() for service in services
    ]
    sampler = clients[0].save_weights_and_get_sampling_client().result()
    clients[1].save_weights_and_get_sampling_client().result()
    yield Tenants(services[0], base, *clients, sampler)
    for service in services:
        service.close("success").result()


def prompt(*tokens: int) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


def datum(tokens: list[int], **inputs: Any) -> types.Datum:
    arrays = {name: np.asarray(values) for name, values in inputs.items()}
    return types.Datum(model_input=prompt(*tokens), loss_fn_inputs=arrays)


def good(seed: int) -> list[types.Datum]:
    tokens = np.random.default_rng(seed).integers(0, 256, 9)
    return [datum(tokens[:-1].tolist(), target_tokens=tokens[1:])]


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def trains(
    *data: types.Datum, loss: Any = "cross_entropy", **config: float
) -> Callable[[Tenants], Any]:
    """A batch whose last datums are wrong; it fails whole."""
    batch = [*good(0), *data]
    return lambda t: t.client.forward_backward(batch, loss, config or None)


def steps(**adam: float) -> Callable[[Tenants], Any]:
    return lambda t: t.client.optim_step(types.AdamParams(**adam))


def samples(text: types.ModelInput, number: int = 1, **params: Any) -> Callable[[Tenants], Any]:
    settings = types.SamplingParams(**({"max_tokens": 4} | params))
    return lambda t: t.sampler.sample(text, number, settings)


def saves(name: str, **options: Any) -> Callable[[Tenants], Any]:
    return lambda t: t.client.save_state(name, **options)


def saves_for_sampler(name: str) -> Callable[[Tenants], Any]:
    return lambda t: t.client.save_weights_for_sampler(name)


def creates(rank: int) -> Callable[[Tenants], Any]:
    return lambda t: t.service.create_lora_training_client(t.base, rank=rank)


def resumes(path: str) -> Callable[[Tenants], Any]:
    return lambda t: t.service.create_training_client_from_state(path)


def loads(path: str) -> Callable[[Tenants], Any]:
    return lambda t: t.client.load_state(path)


OFF_POLICY = {"target_tokens": [1, 2], "logprobs": floats(-1, -1), "advantages": floats(1, 1)}
IMAGE = types.ModelInput(chunks=[types.ImageChunk(data=b"png", format="png", expected_tokens=1)])
NO_NAME = "take one path segment of at most 255"

MISTAKES: dict[str, tuple[Callable[[Tenants], Any], str]] = {
    # passes
    "loss": (trains(loss="nonsense"), "loss_fn: there is no loss 'nonsense'; use one of cross_en"),
    "token": (
        trains(datum([1, VOCAB], target_tokens=[1, 2])),
        rf"data\[1\].model_input: token id {VOCAB} at position 1 is outside the vocabulary",
    ),
    "negative token": (trains(datum([-1], target_tokens=[1])), "token id -1 at position 0"),
    "target": (
        trains(datum([1, 2], target_tokens=[1, VOCAB])),
        rf"data\[1\].loss_fn_inputs.target_tokens: token id {VOCAB} at position 1",
    ),
    "lengths": (
        trains(datum([1, 2], target_tokens=[1])),
        r"data\[1\].loss_fn_inputs.target_tokens: has 1 positions but model_input has 2 tokens",
    ),
    "length of weights": (
        trains(datum([1, 2], target_tokens=[1, 2], weights=floats(1))),
        r"data\[1\].loss_fn_inputs.weights: has shape \[1\] but target_tokens has \[2\]",
    ),
    "no targets": (trains(datum([1])), r"data\[1\].loss_fn_inputs.target_tokens: is missing"),
    "no logprobs": (
        lambda t: t.client.forward_backward([datum([1], target_tokens=[1])], "ppo"),
        r"data\[0\].loss_fn_inputs.logprobs: is missing; ppo needs it",
    ),
    "nan": (
        trains(datum([1], target_tokens=[1], weights=floats(np.nan))),
        r"data\[1\].loss_fn_inputs.weights: value 0 is nan, which is not finite",
    ),
    "infinite": (
        lambda t: t.client.forward_backward(
            [datum([1, 2], **(OFF_POLICY | {"advantages": floats(1, -np.inf)}))], "cispo"
        ),
        r"data\[0\].loss_fn_inputs.advantages: value 1 is -inf",
    ),
    "float targets": (trains(datum([1], target_tokens=floats(1))), "token ids are integers"),
    "unknown input": (
        trains(datum([1], target_tokens=[1], rewards=floats(1))),
        r"data\[1\].loss_fn_inputs.rewards: cross_entropy takes no such input",
    ),
    "context": (
        trains(datum([1] * (CONTEXT + 1), target_tokens=[1] * (CONTEXT + 1))),
        rf"data\[1\].model_input: has {CONTEXT + 1} tokens but the context holds {CONTEXT}",
    ),
    "no tokens": (trains(datum([], target_tokens=[1])), r"data\[1\].model_input: holds no tokens"),
    "image": (
        trains(types.Datum(model_input=IMAGE, loss_fn_inputs={"target_tokens": np.array([1])})),
        r"data\[1\].model_input.chunks\[0\]: this engine takes tokens only, not image",
    ),
    "config": (trains(beta=1.0), "loss_fn_config.beta: cross_entropy has no such key"),
    "range of config": (
        lambda t: t.client.forward_backward(
            [datum([1, 2], **OFF_POLICY)], "ppo", {"clip_low_threshold": -0.5}
        ),
        "loss_fn_config.clip_low_threshold: is -0.5; give a number from 0",
    ),
    "order of config": (
        lambda t: t.client.forward_backward(
            [datum([1, 2], **OFF_POLICY)], "ppo", {"clip_high_threshold": 0.5}
        ),
        "loss_fn_config.clip_high_threshold: 0.5 is below clip_low_threshold 0.8",
    ),
    "infinite loss": (
        trains(datum([1, 2], target_tokens=[1, 2], weights=floats(3e38, 3e38))),
        "cross_entropy came to|a gradient is not finite",
    ),
    # steps
    "beta1": (steps(beta1=1.5), r"adam_params.beta1: .*less than 1 \(is 1.5\)"),
    "beta2": (steps(beta2=-0.1), r"adam_params.beta2: .*\(is -0.1\)"),
    "eps": (steps(eps=-1.0), r"adam_params.eps: .*\(is -1.0\)"),
    "decay": (steps(weight_decay=-1.0), r"adam_params.weight_decay: .*\(is -1.0\)"),
    "clip": (steps(grad_clip_norm=-1.0), r"adam_params.grad_clip_norm: .*\(is -1.0\)"),
    # samples
    "sampled token": (samples(prompt(1, 9999)), "prompt: token id 9999 at position 1"),
    "no prompt": (samples(prompt()), "prompt: holds no tokens"),
    "long prompt": (samples(prompt(*[1] * CONTEXT)), f"prompt: has {CONTEXT} tokens"),
    "no samples": (samples(prompt(1), 0), "num_samples: .*greater than or equal to 1"),
    "many samples": (samples(prompt(1), 10**6), "num_samples: .*less than or equal to 4096"),
    "temperature": (samples(prompt(1), temperature=-1.0), "temperature: is -1.0"),
    "top_p": (samples(prompt(1), top_p=1.5), "top_p: is 1.5"),
    "top_k": (samples(prompt(1), top_k=-2), "top_k: is -2"),
    "max_tokens": (samples(prompt(1), max_tokens=0), "max_tokens: is 0"),
    "empty stop": (samples(prompt(1), stop=[""]), "stop: is"),
    "image prompt": (samples(IMAGE), r"prompt.chunks\[0\]: this engine takes tokens only"),
    # names
    "climbing": (saves("../x"), rf"path: '../x' holds '/'[\s\S]*{NO_NAME}"),
    "slash": (saves("a/b"), NO_NAME),
    "backslash": (saves("a\\b"), NO_NAME),
    "dots": (saves(".."), NO_NAME),
    "empty": (saves(""), NO_NAME),
    "long": (saves("x" * 300), rf"the name has 300 characters[\s\S]*{NO_NAME}"),
    "nul": (saves("a\0b"), NO_NAME),
    "newline": (saves("a\n"), NO_NAME),
    "climbing sampler": (saves_for_sampler("../../x"), NO_NAME),
    "short life": (saves("y", ttl_seconds=60), "ttl_seconds: .*3600"),
    "long life": (saves("y", ttl_seconds=10**9), "ttl_seconds: "),
    # models and paths
    "rank 0": (creates(0), "lora_config.rank: is 0; take one from 1 to"),
    "rank -1": (creates(-1), "lora_config.rank: is -1; take one from 1 to"),
    "rank huge": (creates(10**6), "lora_config.rank: is 1000000; take one from 1 to"),
    "base model": (
        lambda t: t.service.create_lora_training_client("other"),
        "base_model: this engine does not serve 'other'; ask for",
    ),
    "no checkpoint": (resumes("tinker://m/weights/none"), "there is no checkpoint tinker://m/wei"),
    "no path": (resumes("nonsense"), "'nonsense' is not the URI of a checkpoint"),
    "climbing path": (resumes("tinker://../weights/x"), "is not the URI of a checkpoint"),
    "load": (loads("tinker://m/weights/none"), "there is no checkpoint tinker://m/weights/none"),
    "load no path": (loads("/etc/passwd"), "'/etc/passwd' is not the URI of a checkpoint"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("ignore:DEPRECATED")
def test_a_mistake_comes_back_at_once_and_changes_nothing(tenants: Tenants, name: str) -> None:
    make, said = MISTAKES[name]
    started = time.perf_counter()
    with pytest.raises(tinker.RequestFailedError, match=said) as caught:
        make(tenants).result()
    assert time.perf_counter() - started < AT_ONCE_SECONDS
    assert caught.value.category == types.RequestErrorCategory.User
    tenants.both_train_on()


def test_a_name_is_taken_once(tenants: Tenants) -> None:
    tenants.client.save_state("taken").result()
    with pytest.raises(tinker.RequestFailedError, match=r"there is a checkpoint .*taken already"):
        tenants.client.save_state("taken").result()
    tenants.client.save_state("taken", overwrite=True).result()
    tenants.both_train_on()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model_path": "tinker://m/sampler_weights/none"}, "there is no checkpoint tinker://m/sa"),
        ({"model_path": "tinker://nonsense"}, "is not the URI of a checkpoint"),
        ({"base_model": "other"}, "does not serve 'other'"),
    ],
)
def test_where_there_is_no_future_it_is_a_bad_request(
    tenants: Tenants, options: dict[str, str], said: str
) -> None:
    started = time.perf_counter()
    with pytest.raises(tinker.BadRequestError, match=said):
        tenants.service.create_sampling_client(**options).result()
    assert time.perf_counter() - started < AT_ONCE_SECONDS


def test_keys(shared_engine: EngineProcess) -> None:
    started = time.perf_counter()
    wrong = tinker.ServiceClient(base_url=shared_engine.url, api_key="tml-wrong")
    with pytest.raises(tinker.AuthenticationError, match="not the one that the engine was started"):
        wrong.create_lora_training_client("x", rank=4).result()
    assert time.perf_counter() - started < AT_ONCE_SECONDS
    answer = httpx.post(f"{shared_engine.url}/api/v1/create_session", json={})
    assert (answer.status_code, "X-API-Key" in answer.json()["detail"]) == (401, True)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("forward_backward", b"\xff\xff", "body: is no ForwardBackwardRequest protobuf"),
        ("optim_step", b"{", "body: Invalid JSON"),
        ("asample", b"[]", "body: Input should be an object"),
        ("create_model", b"\xff", "body: Invalid JSON"),
    ],
)
def test_bodies_that_are_none(
    shared_engine: EngineProcess, path: str, body: bytes, said: str
) -> None:
    headers = {"X-API-Key": KEY}
    with httpx.Client(base_url=f"{shared_engine.url}/api/v1", headers=headers) as http:
        ticket = http.post(path, content=body).raise_for_status().json()
        told = http.post("retrieve_future", json={"request_id": ticket["request_id"]}).json()
    assert (told["category"], said in told["error"]) == ("user", True)


def test_gradients_that_are_too_large_move_nothing(tenants: Tenants) -> None:
    """Every gradient is finite, but not the norm of all."""
    huge = datum([1, 2], target_tokens=[5, 6], weights=floats(1e30, 1e30))
    tenants.client.forward_backward([huge], "cross_entropy").result()
    with pytest.raises(tinker.RequestFailedError, match="the step was not taken") as caught:
        tenants.client.optim_step(ADAM).result()
    assert caught.value.category == types.RequestErrorCategory.User
    tenants.both_train_on()
