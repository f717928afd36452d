"""Locks: requests that are retried, doubled, reordered or lost are applied exactly once.

The real SDK over proxies on which requests go wrong (`tests/servers/faults.py`): what comes out is
the bits of the run over a proxy on which none does. Then numbers that SDKs do not send: lost ones,
late ones, and ones that come twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from engine_process import KEY, EngineProcess
from hosted_engine import HostedEngine, a_pass, hosted_engine
from safetensors.numpy import load_file
from scripted_backend import ScriptedBackend
from tinker import types

from backends.engine.scheduler import LOST_NUMBER_SECONDS
from tests.servers.faults import WAYS, faulty_proxy

ADAM = types.AdamParams(learning_rate=1e-2)
STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """All that a run leaves behind, and all that it was told."""

    seen: bytes
    weights: dict[str, bytes]
    version: int
    samples: list[list[int]]
    checkpoints: list[str]


def batch(seed: int) -> list[types.Datum]:
    """Five ragged datums: three posts."""
    rng = np.random.default_rng(seed)
    data = []
    for length in rng.integers(2, 12, 5):
        tokens = rng.integers(0, 256, length + 1)
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        prompt = types.ModelInput.from_ints(tokens[:-1].tolist())
        data.append(types.Datum(model_input=prompt, loss_fn_inputs=inputs))
    return data


def train(url: str, home: Path) -> Outcome:
    """A run with every kind of operation in it, pipelined."""
    with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
        base = str(home / "base")
        client = service.create_lora_training_client(base, rank=4, seed=5).result()
        told = []
        for step in range(STEPS):
            passed = client.forward_backward(batch(step), "cross_entropy")
            stepped = client.optim_step(ADAM)
            told += [passed, stepped]
            if step == 1:
                told.append(client.save_state("middle"))
        named = client.save_weights_for_sampler("last")
        sampler = client.save_weights_and_get_sampling_client().result()
        params = types.SamplingParams(max_tokens=8, seed=3, stop=[])
        drawn = sampler.sample(types.ModelInput.from_ints([1, 2]), 2, params).result()
        seen = b"".join(
            row["logprobs"].to_numpy().tobytes()
            for passed in told
            for row in getattr(passed.result(), "loss_fn_outputs", [])
        )
        client.save_state("end").result()
        named.result()
        store = home / "store" / client.model_id.replace(":", "_")
        tensors = load_file(store / "weights/end/adapter_model.safetensors")
        tensors |= load_file(store / "weights/end/optimizer.safetensors")
        return Outcome(
            seen,
            {name: tensor.tobytes() for name, tensor in tensors.items()},
            json.loads((store / "weights/end/state.json").read_text())["version"],
            [sequence.tokens for sequence in drawn.sequences],
            sorted(f"{found.parent.parent.name}/{found.parent.name}" for found in _saved(store)),
        )


def _saved(store: Path) -> list[Path]:
    return list(store.rglob("manifest.json"))


def test_faults_on_the_way_change_no_bit(shared_engine: EngineProcess, engine_home: Path) -> None:
    """All at once, as what takes time is the SDK's waiting before it tries again."""
    with ExitStack() as stack:
        served = {
            way: stack.enter_context(faulty_proxy(shared_engine.url, way)) for way in (None, *WAYS)
        }
        pool = stack.enter_context(ThreadPoolExecutor(len(served)))
        runs = {way: pool.submit(train, url, engine_home) for way, (url, _) in served.items()}
        undisturbed = runs.pop(None).result()
        outcomes = {way: run.result() for way, run in runs.items()}
    assert undisturbed.version == STEPS
    assert undisturbed.checkpoints == ["sampler_weights/last", "weights/end", "weights/middle"]
    for way, outcome in outcomes.items():
        faults = served[way][1]
        assert {"forward_backward", "optim_step", "save_weights", "create_model"} <= set(faults)
        assert outcome == undisturbed, way


# -- numbers that SDKs do not send -------------------------------------------------------------


@pytest.fixture
def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
def hosted(tmp_path: Path, backend: ScriptedBackend) -> Iterator[HostedEngine]:
    with hosted_engine("none", tmp_path, lambda: backend, lost_number_seconds=0.2) as hosted:
        yield hosted
        backend.gate.set()


def a_step(model: str, seq: int, **adam: float) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1, **adam}}


def scripted_pass(model: str, seq: int, token: int) -> bytes:
    """A pass that adds its first token to the scripted model's gradients."""
    message = a_pass(model, seq)
    for datum in message.data:
        tokens = np.frombuffer(datum.model_input[0].encoded_text.tokens, np.int32) % 8
        tokens[0] = token
        datum.model_input[0].encoded_text.tokens = tokens.tobytes()
        targets = datum.loss_fn_inputs["target_tokens"]
        targets.dense = bytes(len(targets.dense))
    return bytes(message.SerializeToString())


def error(hosted: HostedEngine, ticket: Any) -> str:
    result = hosted.result(ticket)
    assert result["category"] == "user", result
    return str(result["error"])


def test_a_lost_number_holds_its_model_up_for_a_while_only(
    hosted: HostedEngine, backend: ScriptedBackend
) -> None:
    """The number of a body that nobody could read is not known to have been used."""
    assert LOST_NUMBER_SECONDS == 60, "outside of tests"
    model = hosted.model(hosted.session())
    unread = hosted.train(b"\xff\xff\xff").json()
    assert "is no ForwardBackwardRequest" in error(hosted, unread)
    later = hosted.train(scripted_pass(model, 2, 5)).json()
    stepped = hosted.post("optim_step", a_step(model, 3))
    assert hosted.result(stepped)["metrics"] == {"grad_norm": 1.0}
    assert hosted.result(later).metrics == {"loss:sum": 1.0}
    late = hosted.train(scripted_pass(model, 1, 7)).json()
    assert "number 1 comes too late: the next one is 4" in error(hosted, late)
    assert backend.calls == ["create 2", "train 5", "step 5"]


def test_who_waits_for_a_lost_number_does_not_hold_up_others(
    hosted: HostedEngine, backend: ScriptedBackend
) -> None:
    session = hosted.session()
    held, other = hosted.model(session, 0), hosted.model(session, 1)
    waiting = hosted.train(scripted_pass(held, 2, 5)).json()
    hosted.result(hosted.train(scripted_pass(other, 1, 6)).json())
    assert backend.calls[-1] == "train 6"
    hosted.result(waiting)
    assert backend.calls[-1] == "train 5"


def test_a_refused_post_uses_up_its_number(hosted: HostedEngine, backend: ScriptedBackend) -> None:
    """Whatever is wrong with it, as long as its number can be read."""
    model = hosted.model(hosted.session())
    refused = [
        hosted.train(scripted_pass(model, 1, 999)).json(),
        hosted.post("optim_step", a_step(model, 2, beta1=2.0)),
        hosted.post("save_weights", {"model_id": model, "seq_id": 3, "path": "../x"}),
        hosted.post("optim_step", {"model_id": model, "seq_id": 4, "adam_params": "none"}),
    ]
    hosted.result(hosted.train(scripted_pass(model, 5, 5)).json())
    assert [bool(error(hosted, ticket)) for ticket in refused] == [True] * 4
    assert backend.calls == ["create 2", "train 5"]


def test_a_number_that_comes_again_is_the_first_request(
    hosted: HostedEngine, backend: ScriptedBackend
) -> None:
    """While it waits, while it runs, and when it is done."""
    model = hosted.model(hosted.session())
    backend.gate.clear()
    second = [hosted.train(scripted_pass(model, 2, 6)).json() for _ in range(2)]
    first = [hosted.train(scripted_pass(model, 1, 5)).json() for _ in range(2)]
    backend.gate.set()
    hosted.result(second[0])
    first.append(hosted.train(scripted_pass(model, 1, 5)).json())
    assert len({ticket["request_id"] for ticket in first}) == 1
    assert len({ticket["request_id"] for ticket in second}) == 1
    other = hosted.post("optim_step", a_step(model, 1))
    assert other == first[0], "the number decides, not what comes with it"
    assert backend.calls == ["create 2", "train 5", "train 6"]


def test_a_refused_number_stays_refused(hosted: HostedEngine, backend: ScriptedBackend) -> None:
    """Its client was told that it failed, and has gone on."""
    model = hosted.model(hosted.session())
    wrong = hosted.train(scripted_pass(model, 1, 999)).json()
    mended = hosted.train(scripted_pass(model, 1, 5)).json()
    assert error(hosted, mended) == error(hosted, wrong)
    assert backend.calls == ["create 2"]
