"""`TinkerBackend` over the real SDK and a real engine: what goes over the wire, and when."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
import tinker
import torch
from tinker import types as tinker_types

from backends.base import ModelOutput, ModelSpec, SavedState
from backends.embedded import EmbeddedKind, EmbeddedParams, EngineProcess
from backends.errors import Problem, StateLostError, UserError
from backends.tinker import TinkerBackend, TinkerKind, TinkerParams, connect, house_error
from backends.waiting import WAITS
from tests.servers.proxy import recording_proxy

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples/models/tiny-qwen3")
SPEC = ModelSpec(name=MODEL, lora_rank=4, seed=3)
KEY = "tml-a-key-of-the-tests"
ADAM = tinker_types.AdamParams(learning_rate=1e-2)


def datum(tokens: list[int]) -> tinker.Datum:
    return tinker.Datum(
        model_input=tinker_types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(tokens[1:]),
            "weights": np.ones(len(tokens) - 1, dtype=np.float32),
        },
    )


DATA = [datum([5, 6, 7, 8, 9]), datum([11, 12, 13])]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[EngineProcess]:
    engine = await EngineProcess.start(EmbeddedParams(threads=1), MODEL, KEY)
    yield engine
    await engine.stop()


async def test_optim_step_is_on_the_wire_before_forward_backward_is_answered(
    engine: EngineProcess,
) -> None:
    with recording_proxy(engine.url) as wire:
        backend = await connect(TinkerBackend, wire.url, KEY, SPEC, None)
        # No result is handed out before the optimizer step has arrived: a client that waits for
        # forward_backward first would wait for ever.
        wire.hold, wire.until = "retrieve_future", "optim_step"
        del wire.arrived[:]
        pending = backend.forward_backward_async(DATA, loss_fn="cross_entropy")
        stepping = backend.optim_step_async(ADAM)
        async with asyncio.timeout(30):
            result = await pending
            await stepping
        sent = [name for name in wire.arrived if name in ("forward_backward", "optim_step")]
        assert sent == ["forward_backward", "optim_step"]
        assert result.metrics["loss:sum"] > 0
        await backend.aclose()


async def test_methods_submit_when_called_and_not_when_awaited(engine: EngineProcess) -> None:
    with recording_proxy(engine.url) as wire:
        backend = await connect(TinkerBackend, wire.url, KEY, SPEC, None)
        del wire.arrived[:]
        calls: list[Any] = [
            backend.forward_backward_async(DATA, loss_fn="cross_entropy"),
            backend.optim_step_async(ADAM),
            backend.save_full_state("one"),
            backend.save_for_sampler("two"),
        ]
        wanted = ["forward_backward", "optim_step", "save_weights", "save_weights_for_sampler"]
        async with asyncio.timeout(30):
            while [name for name in wire.arrived if name in wanted] != wanted:
                await asyncio.sleep(0.01)
        for call in calls:
            await call
        await backend.aclose()


async def test_a_server_that_pauses_its_clients_is_waited_for_and_says_why(
    engine: EngineProcess,
) -> None:
    """Once a change, and not at each of the polls; already while the model is created."""
    heard: list[str] = []
    with recording_proxy(engine.url) as wire, WAITS.told_to(heard.append):
        wire.pauses = ["all GPUs are in use"] * 3
        backend = await connect(TinkerBackend, wire.url, KEY, SPEC, None)
        assert heard == [
            "the server has paused this run's requests: all GPUs are in use",
            "the server goes on after 0 s",
        ]
        del heard[:]
        wire.pauses = ["", "", "maintenance"]
        result = await backend.forward_backward_async(DATA, loss_fn="cross_entropy")
        assert result.metrics["loss:sum"] > 0
        assert heard == [
            "the server has paused this run's requests: it is short of capacity",
            "the server has paused this run's requests: maintenance",
            "the server goes on after 0 s",
        ]
        await backend.aclose()


async def test_a_state_that_expired_is_deleted_at_the_server(
    engine: EngineProcess, caplog: pytest.LogCaptureFixture
) -> None:
    backend = await connect(TinkerBackend, engine.url, KEY, SPEC, None)
    old, _ = [await backend.save_full_state(name) for name in ("old", "new")]
    states = {path.name for path in engine.scratch.glob("checkpoints/*/weights/*")}
    await asyncio.to_thread(backend.discard_state, old)
    left = {path.name for path in engine.scratch.glob("checkpoints/*/weights/*")}
    assert states - left == {"old"}
    assert "new" in left
    await asyncio.to_thread(backend.discard_state, old)  # a failure ends no run
    assert f"{old} stays at the server" in caplog.text
    await backend.aclose()


async def test_the_page_on_the_engine_trains_as_it_says(engine: EngineProcess) -> None:
    page = (ROOT / "docs/engine.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    environment = {**os.environ, "TINKER_BASE_URL": engine.url, "TINKER_API_KEY": KEY}
    script = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        block.replace("examples/models/tiny-qwen3", MODEL),
        env=environment,
        stdout=asyncio.subprocess.PIPE,
    )
    said, _ = await script.communicate()
    assert script.returncode == 0
    loss, saved = said.decode().splitlines()
    assert float(loss.split()[0]) > 0
    assert saved.startswith("tinker://")
    assert saved.endswith("/weights/first")


async def test_a_custom_loss_trains_like_the_servers_own(engine: EngineProcess) -> None:
    def sum_of_nll(output: ModelOutput, data: list[tinker.Datum]) -> torch.Tensor:
        return -output.logprobs.sum()

    results = []
    for custom in (False, True):
        backend = await connect(TinkerBackend, engine.url, KEY, SPEC, None)
        for _ in range(3):
            if custom:
                first = backend.forward_backward_custom_async(DATA, sum_of_nll)
            else:
                first = backend.forward_backward_async(DATA, loss_fn="cross_entropy")
            stepped = backend.optim_step_async(ADAM)
            await first
            await stepped
        last = await backend.forward_backward_async(DATA, loss_fn="cross_entropy")
        results.append(np.concatenate([o["logprobs"].to_numpy() for o in last.loss_fn_outputs]))
        await backend.aclose()
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    (
        {"loss_fn": "no_such_loss"},
        "loss_fn",
        "there is no loss 'no_such_loss'; use one of cross_entropy, ",
    ),
    (
        {"loss_fn": "ppo", "loss_fn_config": {"clip": 0.1}},
        "loss_fn_config.clip",
        "ppo has no such key; ",
    ),
    (
        {"loss_fn": "ppo"},
        "data[0].loss_fn_inputs.weights",
        "ppo takes no such input; ",
    ),
]


@pytest.mark.parametrize(("loss", "where", "what"), MISTAKES)
async def test_a_mistake_in_a_request_is_the_users(
    loss: dict[str, Any], where: str, what: str, engine: EngineProcess
) -> None:
    backend = await connect(TinkerBackend, engine.url, KEY, SPEC, None)
    with pytest.raises(UserError) as refused:
        await backend.forward_backward_async(DATA, **loss)
    (problem,) = refused.value.problems
    assert problem.where == where
    assert problem.what.startswith(what)
    assert "self." not in problem.what
    await backend.aclose()


@pytest.mark.parametrize(
    ("answer", "where"), [("ForwardBackwardOutput", "loss_fn"), ("OptimStepResponse", "backend")]
)
async def test_another_servers_sentence_is_all_that_is_told(answer: str, where: str) -> None:
    kept = f"for self.request_id='a:1' and expected type self.model_cls=<class 'tinker.{answer}'>"
    failed = [
        tinker.RequestFailedError(f"Request failed: not so {kept}", "a:1", category)
        for category in (
            tinker_types.RequestErrorCategory.User,
            tinker_types.RequestErrorCategory.Server,
        )
    ]
    mistake = house_error(failed[0])
    assert isinstance(mistake, UserError)
    assert mistake.problems == (Problem(where, "not so"),)
    assert str(house_error(failed[1])) == "the server failed on a request: not so"


async def test_a_refused_key_is_found_before_anything_is_made(
    engine: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = TinkerParams(base_url=engine.url, api_key_env="SOME_KEY")
    monkeypatch.delenv("SOME_KEY", raising=False)
    assert "SOME_KEY is not set" in str(TinkerKind.check(params, SPEC)[0])
    monkeypatch.setenv("SOME_KEY", "tml-wrong")
    assert "refused the key" in str(TinkerKind.check(params, SPEC)[0])
    monkeypatch.setenv("SOME_KEY", KEY)
    assert TinkerKind.check(params, SPEC) == []
    other = ModelSpec(name="Qwen/Qwen3-8B")
    assert "does not serve 'Qwen/Qwen3-8B'" in str(TinkerKind.check(params, other)[0])
    nowhere = TinkerParams(base_url="http://127.0.0.1:9", api_key_env="SOME_KEY")
    assert "no answer from http://127.0.0.1:9" in str(TinkerKind.check(nowhere, SPEC)[0])


async def test_a_killed_engine_is_told_at_once() -> None:
    backend = await EmbeddedKind.open(EmbeddedParams(threads=1), SPEC, None)
    os.kill(backend.engine.process.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        with pytest.raises(StateLostError, match="was killed by signal 9"):
            await backend.forward_backward_async(DATA, loss_fn="cross_entropy")
        await backend.aclose()
    assert not backend.engine.scratch.exists()


async def test_sampling_from_a_killed_engine_is_told_at_once() -> None:
    backend = await EmbeddedKind.open(EmbeddedParams(threads=1), SPEC, None)
    client = await backend.snapshot_sampling_client()
    prompt = tinker_types.ModelInput.from_ints([1, 2, 3])
    answer = client.sample(prompt, 1, tinker_types.SamplingParams(max_tokens=4000))
    os.kill(backend.engine.process.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        with pytest.raises(StateLostError, match="was killed by signal 9"):
            await answer
        await backend.aclose()


@pytest.mark.parametrize("operation", ["forward_backward", "optim_step", "save", "snapshot"])
async def test_a_model_that_the_server_has_unloaded_is_lost(
    engine: EngineProcess, operation: str
) -> None:
    backend = await connect(TinkerBackend, engine.url, KEY, SPEC, None)
    await backend.forward_backward_async(DATA, loss_fn="cross_entropy")
    async with httpx.AsyncClient(trust_env=False, headers={"X-API-Key": KEY}) as client:
        url = f"{engine.url}/api/v1/unload_model"
        answer = await client.post(url, json={"model_id": backend.model_id})
        assert answer.status_code == 200
        told = {"request_id": answer.json()["request_id"], "allow_metadata_only": False}
        await client.post(f"{engine.url}/api/v1/retrieve_future", json=told)
    operations: dict[str, Callable[[], Awaitable[Any]]] = {
        "forward_backward": lambda: backend.forward_backward_async(DATA, loss_fn="cross_entropy"),
        "optim_step": lambda: backend.optim_step_async(ADAM),
        "save": lambda: backend.save_full_state("a"),
        "snapshot": backend.snapshot_sampling_client,
    }
    async with asyncio.timeout(20):
        with pytest.raises(StateLostError, match="unload"):
            await operations[operation]()
    await backend.aclose()


async def test_a_poisoned_client_tells_what_poisoned_it() -> None:
    poison = RuntimeError("this TrainingClient is poisoned and cannot accept further requests")
    poison.__cause__ = UserError(Problem("loss_fn", "returns no scalar"))
    assert house_error(poison) is poison.__cause__
    assert isinstance(house_error(RuntimeError("something else")), StateLostError)


async def test_an_exported_checkpoint_goes_on_bit_for_bit_in_another_engine(tmp_path: Path) -> None:
    async def train(backend: Any, steps: int) -> None:
        for _ in range(steps):
            pending = backend.forward_backward_async(DATA, loss_fn="cross_entropy")
            await backend.optim_step_async(ADAM)
            await pending

    async def files(backend: Any, name: str) -> dict[str, bytes]:
        folder = tmp_path / name
        folder.mkdir()
        assert await backend.export_state(await backend.save_full_state(name), folder)
        return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}

    params = EmbeddedParams(threads=1)
    first = await EmbeddedKind.open(params, SPEC, None)
    await train(first, 2)
    await files(first, "middle")
    await train(first, 2)
    whole = await files(first, "whole")
    await first.aclose()

    second = await EmbeddedKind.open(params, SPEC, SavedState(None, tmp_path / "middle"))
    await train(second, 2)
    assert await files(second, "resumed") == whole
    await second.aclose()


async def test_a_server_is_not_asked_to_read_a_folder(tmp_path: Path) -> None:
    state = SavedState(uri=None, folder=tmp_path, optimizer=False)
    with pytest.raises(UserError, match="reads no files of yours"):
        await TinkerKind.open(TinkerParams(base_url="http://127.0.0.1:9"), SPEC, state)


async def test_a_model_that_is_not_there_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"model\.name"):
        await EmbeddedKind.open(EmbeddedParams(), ModelSpec(name="./no/such/folder"), None)
