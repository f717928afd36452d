"""The whole of it: the real SDK, over loopback, against an engine in a process of its own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
import torch
from backend_contract import CONTEXT, END, write_base_model
from engine_process import KEY, EngineProcess, engine
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from backends.engine.checkpoints import import_folder

ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-3)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the base model, the store and the log lie."""
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def running(home: Path) -> Iterator[EngineProcess]:
    """One engine for the module; at its end the pipe is closed, and it has to go by itself."""
    base = write_base_model(home / "base")
    with engine(base, home / "store", "--exit-with-parent", log=home / "log") as running:
        running.wait_ready()
        yield running
        assert running.close_stdin() == 0
    log = (home / "log").read_text()
    assert "Traceback" not in log
    assert KEY not in log


@pytest.fixture(scope="module")
def service(running: EngineProcess) -> Iterator[tinker.ServiceClient]:
    service = tinker.ServiceClient(base_url=running.url, api_key=KEY)
    yield service
    service.close("success").result()


@pytest.fixture
def client(service: tinker.ServiceClient, home: Path) -> tinker.TrainingClient:
    return new_client(service, home)


def new_client(
    service: tinker.ServiceClient, home: Path, seed: int = 0, **options: Any
) -> tinker.TrainingClient:
    """A fresh adapter; the same one for the same seed."""
    base = str(home / "base")
    return service.create_lora_training_client(base, rank=4, seed=seed, **options).result()


def batch(seed: int, count: int = 3) -> list[types.Datum]:
    """Ragged datums, some tokens without weight."""
    rng = np.random.default_rng(seed)
    data = []
    for length in rng.integers(2, 20, count):
        tokens = rng.integers(0, 256, length + 1)
        weights = rng.integers(0, 3, length).astype(np.float32) / 2
        inputs = {"target_tokens": tokens[1:], "weights": weights}
        prompt = types.ModelInput.from_ints(tokens[:-1].tolist())
        data.append(types.Datum(model_input=prompt, loss_fn_inputs=inputs))
    return data


def steps(client: tinker.TrainingClient, first: int, last: int) -> list[bytes]:
    """Train on these batches, one ahead; every step's logprobs, bit for bit."""
    submitted = [
        (client.forward_backward(batch(step), "cross_entropy"), client.optim_step(ADAM))
        for step in range(first, last)
    ]
    seen = [bits(passed.result()) for passed, _ in submitted]
    for _, stepped in submitted:
        assert stepped.result().metrics["grad_norm"] > 0
    return seen


def bits(result: types.ForwardBackwardOutput) -> bytes:
    return b"".join(row["logprobs"].to_numpy().tobytes() for row in result.loss_fn_outputs)


def probe(client: tinker.TrainingClient) -> bytes:
    """What the weights are, as seen from outside."""
    return bits(client.forward(batch(99), "cross_entropy").result())


def prompt(*tokens: int) -> types.ModelInput:
    return types.ModelInput.from_ints(list(tokens))


# -- training and resuming ---------------------------------------------------------------------


def test_training_lowers_the_loss(client: tinker.TrainingClient) -> None:
    losses = []
    for _ in range(5):
        passed = client.forward_backward(batch(1), "cross_entropy")
        client.optim_step(ADAM)
        losses.append(passed.result().metrics["loss:sum"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.9 * losses[0]


def test_info(client: tinker.TrainingClient, home: Path) -> None:
    info = client.get_info()
    assert (info.is_lora, info.lora_rank) == (True, 4)
    assert info.model_data.model_name == str(home / "base")
    text = client.get_tokenizer().decode([104, 105])
    assert text == "hi"


def test_resuming_gives_the_bits_of_not_having_stopped(
    service: tinker.ServiceClient, home: Path
) -> None:
    client = new_client(service, home)
    assert steps(client, 0, 5) == steps(new_client(service, home), 0, 5)
    saved = client.save_state("at-5")
    went_on = steps(client, 5, 8)
    uri = saved.result().path
    assert uri == f"tinker://{client.model_id}/weights/at-5"
    resumed = service.create_training_client_from_state_with_optimizer(uri).result()
    assert steps(resumed, 5, 8) == went_on
    weights_only = service.create_training_client_from_state(uri).result()
    assert weights_only.get_info().lora_rank == 4
    differently = steps(weights_only, 5, 8)
    assert differently[0] == went_on[0]
    assert differently[1:] != went_on[1:]


@pytest.mark.filterwarnings("ignore:DEPRECATED")
def test_loading_into_a_model_that_is_there(service: tinker.ServiceClient, home: Path) -> None:
    client = new_client(service, home)
    steps(client, 0, 2)
    uri = client.save_state("at-2").result().path
    went_on = steps(client, 2, 4)
    loaded = client.load_state_with_optimizer(uri)
    assert steps(client, 2, 4) == went_on
    assert loaded.result().path == uri


def test_a_folder_that_another_process_brought_is_resumed(
    service: tinker.ServiceClient, home: Path, tmp_path: Path
) -> None:
    client = new_client(service, home)
    steps(client, 0, 3)
    client.save_state("exported").result()
    folder = home / "store" / client.model_id.replace(":", "_") / "weights" / "exported"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert set(manifest["files"]) == {
        "adapter_model.safetensors",
        "adapter_config.json",
        "optimizer.safetensors",
        "state.json",
    }
    went_on = steps(client, 3, 5)
    uri = import_folder(home / "store", "from-outside", folder)
    assert uri == "tinker://imported/weights/from-outside"
    resumed = service.create_training_client_from_state_with_optimizer(uri).result()
    assert steps(resumed, 3, 5) == went_on


def test_checkpoints_are_listed_and_named_once(
    service: tinker.ServiceClient, client: tinker.TrainingClient, running: EngineProcess, home: Path
) -> None:
    path = client.save_state("x", user_metadata={"step": "1"}, ttl_seconds=7200).result().path
    with pytest.raises(tinker.RequestFailedError, match=r"there is a checkpoint .* already"):
        client.save_state("x").result()
    assert client.save_state("x", overwrite=True).result().path == path
    rest = tinker.RestClient(base_url=running.url, api_key=KEY)
    listed = rest.list_checkpoints(client.model_id).result().checkpoints
    assert [(c.checkpoint_id, c.tinker_path) for c in listed] == [("weights/x", path)]
    info = rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.train_mlp) == (str(home / "base"), 4, True)
    rest.delete_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.RequestFailedError, match="there is no checkpoint"):
        service.create_training_client_from_state(path).result()


def test_capabilities(running: EngineProcess, home: Path) -> None:
    rest = tinker.RestClient(base_url=running.url, api_key=KEY)
    (model,) = rest.get_server_capabilities().result().supported_models
    assert (model.model_name, model.max_context_length) == (str(home / "base"), CONTEXT)
    assert model.trainable
    assert model.sampleable


def test_a_batch_in_several_chunks(service: tinker.ServiceClient, home: Path) -> None:
    data = [batch(step, count=1)[0] for step in range(1030)]
    whole = new_client(service, home)
    passed = whole.forward_backward(data, "cross_entropy")
    stepped = whole.optim_step(ADAM)
    assert len(passed.result().loss_fn_outputs) == 1030
    parts = new_client(service, home)
    for part in (data[:1024], data[1024:]):
        parts.forward_backward(part, "cross_entropy")
    assert parts.optim_step(ADAM).result().metrics == stepped.result().metrics
    assert probe(parts) == probe(whole)


def test_sparse_soft_targets(client: tinker.TrainingClient) -> None:
    targets, weights = torch.zeros(4, 30, dtype=torch.int64), torch.zeros(4, 30)
    targets[:, 0], weights[:, 0] = torch.tensor([5, 6, 7, 8]), 1.0
    inputs: dict[str, Any] = {"target_tokens": targets, "weights": weights}
    soft = types.Datum(model_input=prompt(1, 2, 3, 4), loss_fn_inputs=inputs)
    hard = {"target_tokens": targets[:, 0].clone()}
    plain = types.Datum(model_input=prompt(1, 2, 3, 4), loss_fn_inputs=hard)
    results = [client.forward([datum], "cross_entropy").result() for datum in (soft, plain)]
    logprobs = [result.loss_fn_outputs[0]["logprobs"].to_numpy() for result in results]
    assert logprobs[0].shape == (4, 30)
    np.testing.assert_allclose(logprobs[0][:, 0], logprobs[1], rtol=1e-5)


def test_a_custom_loss(service: tinker.ServiceClient, home: Path) -> None:
    """The SDK's three-legged pass gives the gradients of the server's own loss."""

    def loss(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        total = sum(
            -(row * torch.tensor(datum.loss_fn_inputs["weights"].data)).sum()
            for datum, row in zip(data, logprobs, strict=True)
        )
        return total, {}

    custom, built_in = new_client(service, home), new_client(service, home)
    passes = [
        custom.forward_backward_custom(batch(1), loss),
        built_in.forward_backward(batch(1), "cross_entropy"),
    ]
    for client, passed in zip((custom, built_in), passes, strict=True):
        client.optim_step(ADAM).result()
        passed.result()
    assert probe(custom) == probe(built_in)


def test_eight_clients_at_once(running: EngineProcess, home: Path) -> None:
    """Each in a thread and a session of its own: the bits that it would have trained alone."""

    def train(number: int, wait: Callable[[], object]) -> bytes:
        with tinker.ServiceClient(base_url=running.url, api_key=KEY) as service:
            base = str(home / "base")
            client = service.create_lora_training_client(base, rank=1 + number, seed=number)
            trained = client.result()
            wait()
            for step in range(4):
                rate = 1e-2 / (1 + number)
                adam = types.AdamParams(learning_rate=rate, weight_decay=0.1 * number)
                trained.forward_backward(batch(100 * number + step), "cross_entropy")
                trained.optim_step(adam)
            return weights(home, trained.save_state("last").result().path)

    alone = [train(number, lambda: None) for number in range(8)]
    together = Barrier(8)
    with ThreadPoolExecutor(8) as threads:
        running_at_once = [threads.submit(train, n, lambda: together.wait(60)) for n in range(8)]
        assert [future.result(120) for future in running_at_once] == alone
    assert len(set(alone)) == 8


def weights(home: Path, path: str) -> bytes:
    """A checkpoint's adapter and optimizer, as they lie in the store."""
    folder = home / "store" / path.removeprefix("tinker://").replace(":", "_")
    names = ("adapter_model.safetensors", "optimizer.safetensors")
    return b"".join((folder / name).read_bytes() for name in names)


# -- replays, over raw HTTP --------------------------------------------------------------------


class Raw:
    """A training client without the SDK, so that requests can be sent again."""

    def __init__(self, running: EngineProcess, model_id: str) -> None:
        headers = {"X-API-Key": KEY}
        self.http = httpx.Client(base_url=f"{running.url}/api/v1", headers=headers)
        self.model_id = model_id

    def train(self, seq: int, step: int) -> str:
        message = forward_backward_request_to_proto(
            types.ForwardBackwardRequest(
                forward_backward_input=types.ForwardBackwardInput(
                    data=batch(step), loss_fn="cross_entropy"
                ),
                model_id=self.model_id,
                seq_id=seq,
            )
        )
        return self._ticket("forward_backward", content=message.SerializeToString())

    def step(self, seq: int) -> str:
        body = {"model_id": self.model_id, "seq_id": seq, "adam_params": ADAM.model_dump()}
        return self._ticket("optim_step", json=body)

    def _ticket(self, path: str, **body: Any) -> str:
        return str(self.http.post(path, **body).raise_for_status().json()["request_id"])

    def wait(self, ticket: str) -> None:
        answer = self.http.post("retrieve_future", json={"request_id": ticket})
        assert answer.status_code == 200


def test_replayed_and_reordered_requests_are_applied_once(
    service: tinker.ServiceClient, running: EngineProcess, home: Path
) -> None:
    plain, spoilt = (new_client(service, home, seed=3) for _ in range(2))
    first, second = Raw(running, plain.model_id), Raw(running, spoilt.model_id)
    for seq in (1, 2, 3):
        first.train(seq, seq)
    first.wait(first.step(4))
    tickets = [second.train(seq, seq) for seq in (2, 3, 2, 1, 1)]
    assert tickets[0] == tickets[2]
    assert tickets[3] == tickets[4]
    steps = [second.step(4) for _ in range(4)]
    second.wait(steps[0])
    steps.append(second.step(4))
    assert len(set(steps)) == 1
    for client in (plain, spoilt):
        client._request_id_counter = client._turn_counter = 4
    assert probe(plain) == probe(spoilt)


# -- sampling ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(service: tinker.ServiceClient, running: EngineProcess, home: Path) -> Any:
    """A training client whose weights are no longer the base model's."""
    client = new_client(service, home)
    steps(client, 0, 3)
    return client


def params(**more: Any) -> types.SamplingParams:
    return types.SamplingParams(**({"max_tokens": 8, "seed": 7, "stop": []} | more))


def test_samples_are_seeded_and_stop(trained: tinker.TrainingClient) -> None:
    sampler = trained.save_weights_and_get_sampling_client().result()
    one = sampler.sample(prompt(1, 2, 3), 2, params()).result()
    again = sampler.sample(prompt(1, 2, 3), 2, params()).result()
    assert [s.tokens for s in one.sequences] == [s.tokens for s in again.sequences]
    assert one.sequences[0].tokens != one.sequences[1].tokens
    assert [len(s.tokens) for s in one.sequences] == [8, 8]
    assert {s.stop_reason for s in one.sequences} == {"length"}
    tokens = one.sequences[0].tokens
    other = sampler.sample(prompt(1, 2, 3), 2, params(seed=8)).result()
    assert other.sequences[0].tokens != tokens
    stop = tokens[3]
    cut = sampler.sample(prompt(1, 2, 3), 1, params(stop=[stop])).result().sequences[0]
    assert cut.tokens == tokens[: tokens.index(stop) + 1]
    assert cut.stop_reason == "stop"


def test_logprobs_are_those_of_a_training_pass(trained: tinker.TrainingClient) -> None:
    sampler = trained.save_weights_and_get_sampling_client().result()
    asked = sampler.sample(
        prompt(1, 2, 3), 1, params(), include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    drawn = asked.sequences[0]
    tokens = [1, 2, 3, *drawn.tokens]
    inputs = {"target_tokens": np.array(tokens[1:])}
    datum = types.Datum(model_input=prompt(*tokens[:-1]), loss_fn_inputs=inputs)
    passed = trained.forward([datum], "cross_entropy").result()
    expected = passed.loss_fn_outputs[0]["logprobs"].data
    assert drawn.logprobs is not None
    assert asked.prompt_logprobs is not None
    np.testing.assert_allclose([*asked.prompt_logprobs[1:], *drawn.logprobs], expected, rtol=1e-4)
    assert asked.prompt_logprobs[0] is None
    top = asked.topk_prompt_logprobs
    assert top is not None
    assert top[0] is None
    assert [len(row or []) for row in top[1:]] == [3, 3]
    scored = sampler.compute_logprobs(prompt(1, 2, 3)).result()
    np.testing.assert_allclose(scored[1:], asked.prompt_logprobs[1:], rtol=1e-6)
    last = sampler.compute_logprobs(prompt(1, 2, 3), prompt_logprobs_last_n=1).result()
    assert last[:2] == [None, None]


def test_a_sampler_keeps_its_weights_and_sampling_leaves_training_alone(
    service: tinker.ServiceClient, home: Path
) -> None:
    client, undisturbed = new_client(service, home), new_client(service, home)
    steps(client, 0, 2)
    sampler = client.save_weights_and_get_sampling_client().result()
    named = client.save_weights_for_sampler("kept").result().path
    before = sampler.sample(prompt(5), 1, params()).result().sequences[0].tokens
    steps(client, 2, 4)
    after = sampler.sample(prompt(5), 1, params()).result().sequences[0].tokens
    assert before == after
    loaded = service.create_sampling_client(model_path=named).result()
    assert loaded.sample(prompt(5), 1, params()).result().sequences[0].tokens == before
    assert loaded.get_base_model() == str(home / "base")
    steps(undisturbed, 0, 4)
    assert probe(client) == probe(undisturbed)


def test_the_base_model_itself(
    service: tinker.ServiceClient, client: tinker.TrainingClient, home: Path
) -> None:
    """A fresh adapter changes nothing, so it has to draw the same."""
    base = service.create_sampling_client(base_model=str(home / "base")).result()
    fresh = client.save_weights_and_get_sampling_client().result()
    drawn = [
        sampler.sample(prompt(9, 8), 1, params()).result().sequences[0] for sampler in (base, fresh)
    ]
    assert drawn[0].tokens == drawn[1].tokens
    ended = base.sample(prompt(9, 8), 4, params(stop=None, max_tokens=60)).result()
    for sequence in ended.sequences:
        stopped = sequence.tokens[-1] == END
        assert stopped == (sequence.stop_reason == "stop")
        assert END not in sequence.tokens[:-1]


async def test_many_samples_at_once(trained: tinker.TrainingClient) -> None:
    sampler = await trained.save_weights_and_get_sampling_client()
    prompts = [prompt(*range(1 + number % 7)[: 1 + number % 7], 40) for number in range(96)]
    alone = [await sampler.sample(prompts[number], 1, params(seed=number)) for number in range(4)]
    started = time.perf_counter()
    together = await asyncio.gather(
        *(sampler.sample(text, 1, params(seed=number)) for number, text in enumerate(prompts))
    )
    assert time.perf_counter() - started < 20
    assert all(len(result.sequences[0].tokens) == 8 for result in together)
    for one, same in zip(alone, together, strict=False):
        assert one.sequences[0].tokens == same.sequences[0].tokens


# -- mistakes ----------------------------------------------------------------------------------


def refused(future: Any) -> str:
    with pytest.raises(tinker.RequestFailedError) as caught:
        future.result()
    assert caught.value.category == types.RequestErrorCategory.User
    return str(caught.value)


def test_a_bad_datum_is_named_and_the_client_stays_usable(
    service: tinker.ServiceClient, home: Path
) -> None:
    client, untouched = new_client(service, home), new_client(service, home)
    wrong = batch(1)
    wrong[2] = types.Datum(
        model_input=prompt(1, 9999), loss_fn_inputs={"target_tokens": np.array([1, 2])}
    )
    started = time.perf_counter()
    said = refused(client.forward_backward(wrong, "cross_entropy"))
    assert time.perf_counter() - started < 5
    assert "data[2].model_input: token id 9999 at position 1 is outside the vocabulary" in said
    short = types.Datum(model_input=prompt(1, 2), loss_fn_inputs={"target_tokens": np.array([1])})
    said = refused(client.forward_backward([short], "cross_entropy"))
    assert "data[0].loss_fn_inputs.target_tokens: has 1 positions but model_input has 2" in said
    unknown: Any = "nonsense"
    assert "there is no loss 'nonsense'" in refused(client.forward(batch(1), unknown))
    assert steps(client, 0, 2) == steps(untouched, 0, 2)


def test_bad_samples_models_and_paths(service: tinker.ServiceClient, home: Path) -> None:
    base = service.create_sampling_client(base_model=str(home / "base")).result()
    assert "outside the vocabulary" in refused(base.sample(prompt(9999), 1, params()))
    assert "num_samples: " in refused(base.sample(prompt(1), 0, params()))
    assert "temperature: " in refused(base.sample(prompt(1), 1, params(temperature=-1)))
    assert "does not serve 'other'" in refused(service.create_lora_training_client("other", rank=4))
    missing = service.create_training_client_from_state("tinker://m/weights/none")
    assert "there is no checkpoint tinker://m/weights/none" in refused(missing)
    with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
        service.create_sampling_client(model_path="tinker://m/sampler_weights/none").result()


def test_a_refused_key(running: EngineProcess) -> None:
    wrong = tinker.ServiceClient(base_url=running.url, api_key="tml-wrong")
    with pytest.raises(tinker.AuthenticationError, match="not the one that the engine was started"):
        wrong.create_lora_training_client("x", rank=4).result()


def test_a_session_that_is_closed(running: EngineProcess, home: Path) -> None:
    with tinker.ServiceClient(base_url=running.url, api_key=KEY) as short:
        client = new_client(short, home)
        steps(client, 0, 1)
    headers = {"X-API-Key": KEY}
    body = {"model_id": client.model_id}
    answer = httpx.post(f"{running.url}/api/v1/get_info", json=body, headers=headers)
    assert (answer.status_code, "its session has ended" in answer.json()["detail"]) == (
        404,
        True,
    )
