"""The HTTP side over a scripted backend: order, replays, refusals, life and death of what it keeps.

Requests are raw, so that they can be wrong, come twice, or come in the wrong order.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from scripted_backend import ScriptedBackend
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_proto_response

from backends.engine import api, checkpoints, sampling
from backends.engine.api import create_app
from backends.engine.checkpoints import CheckpointStore, CheckpointUri
from backends.engine.service import Engine

KEY = "tml-right"


@dataclass
class Client:
    """Raw requests to an engine in this process."""

    http: httpx.AsyncClient
    engine: Engine
    backend: ScriptedBackend

    async def post(self, path: str, body: Any = None, **options: Any) -> Any:
        """POST; the JSON answer, which has to be a 200."""
        answer = await self.http.post(path, json=body, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def model(self, number: int = 0, session: str | None = None) -> str:
        """A new model's id."""
        session = session or (await self.post("create_session", {}))["session_id"]
        body = {"session_id": session, "model_seq_id": number, "base_model": "none"}
        body |= {"lora_config": {"rank": 4}}
        ticket = await self.post("create_model", body)
        return str((await self.result(ticket))["model_id"])

    async def result(self, ticket: Any) -> Any:
        """The answer to a ticket: JSON, or the SDK's type."""
        body = {"request_id": ticket["request_id"]}
        answer = await self.http.post("retrieve_future", json=body)
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "application/json":
            return answer.json()
        kind = types.SampleResponse if "sample_sequence_ids" in ticket else None
        return deserialize_proto_response(answer.content, kind or types.ForwardBackwardOutput)

    async def train(self, model: str, seq: int, token: int, **more: Any) -> Any:
        """Post a forward_backward of one datum."""
        datum = types.Datum(
            model_input=types.ModelInput.from_ints([token, 1]),
            loss_fn_inputs={"target_tokens": np.array([1, 1])},
        )
        message = forward_backward_request_to_proto(
            types.ForwardBackwardRequest(
                forward_backward_input=types.ForwardBackwardInput(
                    data=[datum], loss_fn=more.pop("loss_fn", "cross_entropy")
                ),
                model_id=model,
                seq_id=seq,
            )
        )
        for name, value in more.items():
            setattr(message, name, value)
        answer = await self.http.post("forward_backward", content=message.SerializeToString())
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def step(self, model: str, seq: int) -> Any:
        """Post an optimizer step."""
        body = {"model_id": model, "seq_id": seq, "adam_params": {"learning_rate": 0.1}}
        return await self.post("optim_step", body)

    async def weights(self, model: str, seq: int) -> float:
        """The scripted model's weights."""
        result = await self.result(await self.train(model, seq, 0, forward_only=True))
        return float(result.loss_fn_outputs[0]["logprobs"].data[0])


async def start(
    store: Path | str, backend: ScriptedBackend, key: str = KEY, **options: Any
) -> Client:
    """An engine in this process, and a client of it."""
    engine = Engine("none", CheckpointStore(str(store)), **options)
    await engine.load(lambda: backend)
    transport = httpx.ASGITransport(create_app(engine, KEY))
    http = httpx.AsyncClient(
        transport=transport, base_url="http://engine/api/v1", headers={"X-API-Key": key}
    )
    return Client(http, engine, backend)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    client = await start(tmp_path, ScriptedBackend())
    yield client
    client.backend.gate.set()
    client.engine.stop()
    assert await client.engine.stopped(5)
    await client.http.aclose()


# -- who may ask -------------------------------------------------------------------------------


async def test_nothing_but_healthz_works_without_the_key(client: Client) -> None:
    paths = [("GET", "get_server_capabilities"), ("POST", "create_session"), ("GET", "nowhere")]
    for method, path in paths:
        for key, said in ((None, "no API key"), ("tml-wrong", "not the one"), ("", "not the one")):
            client.http.headers = httpx.Headers({"X-API-Key": key} if key is not None else {})
            answer = await client.http.request(method, path)
            assert answer.status_code == 401
            assert said in answer.json()["detail"]
    client.http.headers = httpx.Headers()
    answer = await client.http.get("healthz")
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})


async def test_until_the_model_is_loaded_it_is_not_healthy(tmp_path: Path) -> None:
    engine = Engine("none", CheckpointStore(str(tmp_path)))
    transport = httpx.ASGITransport(create_app(engine, KEY))
    async with httpx.AsyncClient(transport=transport, base_url="http://e/api/v1") as http:
        assert (await http.get("healthz")).status_code == 503
        answer = await http.post("create_session", json={}, headers={"X-API-Key": KEY})
        assert (answer.status_code, answer.json()["detail"]) == (503, "none is loading")
        await engine.load(ScriptedBackend)
        assert (await http.get("healthz")).status_code == 200
    engine.stop()


# -- order and replays -------------------------------------------------------------------------


async def test_chunks_run_in_the_order_of_their_numbers(client: Client) -> None:
    model = await client.model()
    tickets = [await client.train(model, seq, seq) for seq in (2, 3, 1)]
    tickets.append(await client.step(model, 4))
    for ticket in tickets:
        await client.result(ticket)
    assert client.backend.calls == ["create 4", "train 1", "train 2", "train 3", "step 6"]


async def test_replays_are_done_once(client: Client) -> None:
    model = await client.model()
    tickets = [await client.train(model, 1, 5) for _ in range(3)]
    tickets += [await client.step(model, 2) for _ in range(3)]
    results = [await client.result(ticket) for ticket in tickets]
    tickets.append(await client.step(model, 2))
    results.append(await client.result(tickets[-1]))
    assert len({ticket["request_id"] for ticket in tickets}) == 2
    assert results[3:] == [{"metrics": {"grad_norm": 1.0}}] * 4
    assert client.backend.calls == ["create 4", "train 5", "step 5"]


async def test_replayed_creations_and_saves_are_the_same_ones(client: Client) -> None:
    session = (await client.post("create_session", {}))["session_id"]
    assert await client.model(0, session) == await client.model(0, session)
    model = f"{session}:train:0"
    save = {"model_id": model, "seq_id": 1, "path": "x"}
    saved = [await client.post("save_weights", save) for _ in range(2)]
    assert [await client.result(s) for s in saved] == [
        {"path": f"tinker://{model}/weights/x", "type": "save_weights"}
    ] * 2
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "none"}
    ids = [await client.post("create_sampling_session", sampling) for _ in range(2)]
    assert ids[0] == ids[1]
    assert client.backend.calls == ["create 4", "save"]


async def test_a_replayed_sample_is_the_same_sample(client: Client) -> None:
    sampler = await sampling_session(client)
    body = sample_body(sampler, seq_id=3, num_samples=2)
    first, again = [await client.post("asample", body) for _ in range(2)]
    assert first == again
    assert len(first["sample_sequence_ids"]) == 2
    await client.result(first)
    assert sum(map(len, client.backend.batches)) == 1


async def test_a_model_is_not_held_up_by_another(client: Client) -> None:
    session = (await client.post("create_session", {}))["session_id"]
    models = [await client.model(number, session) for number in range(3)]
    client.backend.gate.clear()
    tickets = [
        await client.train(model, seq, 10 * lane + seq)
        for lane, model in enumerate(models, 1)
        for seq in (1, 2)
    ]
    client.backend.gate.set()
    for ticket in tickets:
        await client.result(ticket)
    assert [call.split()[1] for call in client.backend.calls[3:]] == [
        *("11", "21", "31"),
        *("12", "22", "32"),
    ]


async def test_a_step_that_is_queued_behind_a_pass_runs_behind_it(client: Client) -> None:
    model = await client.model()
    client.backend.gate.clear()
    passed, stepped = await client.train(model, 1, 5), await client.step(model, 2)
    again = await client.train(model, 3, 6)
    client.backend.gate.set()
    assert (await client.result(again)).loss_fn_outputs[0]["logprobs"].data == [5, 5]
    assert (await client.result(passed)).loss_fn_outputs[0]["logprobs"].data == [0, 0]
    assert (await client.result(stepped))["metrics"] == {"grad_norm": 1.0}


# -- mistakes ----------------------------------------------------------------------------------


async def test_a_bad_body_uses_up_its_number(client: Client) -> None:
    model = await client.model()
    bad = [
        await client.train(model, 1, 999),
        await client.train(model, 2, 5, loss_fn="nonsense"),
        await client.post(
            "optim_step", {"model_id": model, "seq_id": 3, "adam_params": {"beta1": 2}}
        ),
        await client.post("save_weights", {"model_id": model, "seq_id": 4, "path": "../x"}),
        await client.post(
            "load_weights", {"model_id": model, "seq_id": 5, "path": "tinker://m/weights/none"}
        ),
        await client.post(
            "save_weights_external",
            {"model_id": model, "seq_id": 6, "path": "x", "age_encryption_recipients": ["age1"]},
        ),
        await client.post("optim_step", {"model_id": model, "seq_id": 7, "optimizer_params": {}}),
    ]
    said = [
        r"data\[0\].model_input: token id 999",
        "loss_fn: there is no loss 'nonsense'",
        "adam_params.beta1: .*less than 1",
        "path: '../x' holds '/'",
        "path: there is no checkpoint tinker://m/weights/none",
        "age_encryption_recipients: this engine does not encrypt",
        "optim_params: this engine has AdamW only",
    ]
    for ticket, pattern in zip(bad, said, strict=True):
        result = await client.result(ticket)
        assert result["category"] == "user"
        with pytest.raises(AssertionError, match=pattern):
            raise AssertionError(result["error"])
    await client.result(await client.train(model, 8, 5))
    assert (await client.result(await client.step(model, 9)))["metrics"]
    assert client.backend.calls == ["create 4", "train 5", "step 5"]


async def test_a_body_that_says_nothing_is_answered(client: Client) -> None:
    for path in ("forward_backward", "optim_step", "asample", "create_model", "load_weights"):
        answer = await client.http.post(path, content=b"\xff\xfe")
        assert answer.status_code == 200
        assert (await client.result(answer.json()))["category"] == "user"


async def test_a_body_can_be_too_large(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.wire, "MAX_BODY_BYTES", 1000)
    answer = await client.http.post("forward_backward", content=bytes(2000))
    assert "body: has over 1000 bytes" in (await client.result(answer.json()))["error"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"base_model": "other"}, "base_model: this engine does not serve 'other'; ask for 'none'"),
        ({"lora_config": {"rank": 9}}, "lora_config.rank: is 9; take one from 1 to 8"),
        ({"optimizer_config": {"type": "dimuon"}}, "optimizer_config.type: is 'dimuon'"),
    ],
)
async def test_models_that_cannot_be_made(client: Client, change: Any, said: str) -> None:
    session = (await client.post("create_session", {}))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "none"} | change
    result = await client.result(await client.post("create_model", body))
    assert (result["category"], said in result["error"]) == ("user", True)
    answer = await client.http.post("get_info", json={"model_id": f"{session}:train:0"})
    assert answer.status_code == 404


async def test_ids_that_are_not_known_here(client: Client) -> None:
    model = await client.model()
    step = {"seq_id": 1, "adam_params": {}}
    calls: list[tuple[str, Any, int, str]] = [
        ("get_info", {"model_id": "m"}, 404, "model m is not known to this engine"),
        ("optim_step", {"model_id": "m"} | step, 404, "model m is not known to this engine"),
        ("asample", sample_body("s"), 404, "sampler s is not known to this engine"),
        ("session_heartbeat", {"session_id": "s"}, 404, "session s is not known"),
        ("retrieve_future", {"request_id": "r-1"}, 404, "request r-1 is not known"),
        ("weights_info", {"tinker_path": "x"}, 400, "is not the URI of a checkpoint"),
        ("weights_info", {"tinker_path": f"tinker://{model}/weights/x"}, 400, "no checkpoint"),
        ("create_session", {"tags": 1}, 400, "tags: Input should be a valid array"),
    ]
    for path, body, status, said in calls:
        answer = await client.http.post(path, json=body)
        assert (answer.status_code, said in answer.json()["detail"]) == (status, True), answer.text


async def test_a_step_that_was_sent_before_a_failure_was_known_is_refused(client: Client) -> None:
    model = await client.model()
    good, bad = await client.train(model, 1, 5), await client.train(model, 2, 13)
    blind, saved = await client.step(model, 3), await client.train(model, 4, 1, forward_only=True)
    assert "13 brings bad luck" in (await client.result(bad))["error"]
    refused = await client.result(blind)
    assert refused["category"] == "user"
    assert "a forward_backward before it failed; the step was not taken" in refused["error"]
    assert (await client.result(saved)).loss_fn_outputs[0]["logprobs"].data == [0, 0]
    assert "the gradients of the whole batch are dropped" in refused["error"]
    await client.result(good)
    await client.result(await client.train(model, 5, 2))
    assert (await client.result(await client.step(model, 6)))["metrics"]
    calls = ["create 4", "train 5", "train 13", "clear", "forward 1", "train 2", "step 2"]
    assert client.backend.calls == calls


async def test_a_step_after_a_failure_that_was_known_is_taken(client: Client) -> None:
    model = await client.model()
    assert (await client.result(await client.train(model, 1, 999)))["category"] == "user"
    assert (await client.result(await client.train(model, 2, 13)))["category"] == "user"
    await client.result(await client.train(model, 3, 2))
    assert (await client.result(await client.step(model, 4)))["metrics"]
    assert await client.weights(model, 5) == 2


async def test_after_an_error_that_nobody_expected_the_model_is_in_doubt(client: Client) -> None:
    model, other = await client.model(), await client.model()
    failed = await client.result(await client.train(model, 1, 14))
    assert failed == {"error": "MemoryError: no room", "category": "server"}
    for ticket in (await client.step(model, 2), await client.train(model, 3, 1)):
        result = await client.result(ticket)
        assert result["category"] == "server"
        assert "is in doubt since an operation failed (MemoryError: no room)" in result["error"]
    await client.result(await client.train(other, 1, 3))
    assert (await client.result(await client.step(other, 2)))["metrics"]


# -- answers -----------------------------------------------------------------------------------


async def test_a_poll_is_held_and_then_asked_again(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "HOLD_SECONDS", 0.05)
    model = await client.model()
    client.backend.gate.clear()
    ticket = await client.train(model, 1, 5)
    answer = await client.http.post("retrieve_future", json=ticket)
    assert answer.status_code == 408
    assert answer.json() | {"request_id": ""} == {
        "type": "try_again",
        "request_id": "",
        "queue_state": "active",
    }
    client.backend.gate.set()
    monkeypatch.setattr(api, "HOLD_SECONDS", 5)
    assert (await client.result(ticket)).metrics == {"loss:sum": 1.0}


async def test_a_stopping_engine_lets_go_of_whoever_waits(client: Client) -> None:
    model = await client.model()
    client.backend.gate.clear()
    ticket = await client.train(model, 1, 5)
    poll = asyncio.create_task(client.http.post("retrieve_future", json=ticket))
    await asyncio.sleep(0.05)
    client.engine.stop()
    assert (await asyncio.wait_for(poll, 1)).status_code == 503


# -- samplers ----------------------------------------------------------------------------------


async def sampling_session(client: Client, **body: Any) -> str:
    session = body.pop("session_id", None)
    session = session or (await client.post("create_session", {}))["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0} | (body or {"base_model": "none"})
    return str((await client.post("create_sampling_session", body))["sampling_session_id"])


def sample_body(sampler: str, **more: Any) -> dict[str, Any]:
    return {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
        "sampling_params": {"max_tokens": 1},
    } | more


async def drawn(client: Client, sampler: str) -> int:
    """The scripted weights that a sampler draws from."""
    result = await client.result(await client.post("asample", sample_body(sampler)))
    assert not isinstance(result, dict), result
    return int(result.sequences[0].tokens[0])


async def snapshot(client: Client, model: str, seq: int, number: int, **more: Any) -> str:
    body = {"model_id": model, "seq_id": seq, "sampling_session_seq_id": number} | more
    result = await client.result(await client.post("save_weights_for_sampler", body))
    return str(result["sampling_session_id"])


async def trained(client: Client, model: str, seq: int, token: int) -> None:
    await client.train(model, seq, token)
    await client.result(await client.step(model, seq + 1))


async def test_waiting_samples_are_drawn_together(client: Client) -> None:
    sampler = await sampling_session(client)
    model = await client.model()
    client.backend.gate.clear()
    await client.train(model, 1, 5)
    tickets = [await client.post("asample", sample_body(sampler, seq_id=n)) for n in range(30)]
    await asyncio.sleep(0.02)
    client.backend.gate.set()
    for ticket in tickets:
        await client.result(ticket)
    assert [len(batch) for batch in client.backend.batches] == [30]


async def test_a_sampler_keeps_the_weights_it_was_made_with(client: Client) -> None:
    model = await client.model()
    await trained(client, model, 1, 5)
    before = await snapshot(client, model, 3, 0)
    moving = await snapshot(client, model, 4, 1, kind="inflight")
    await trained(client, model, 5, 2)
    after = await snapshot(client, model, 7, 2)
    assert [await drawn(client, name) for name in (before, moving, after)] == [5, 5, 7]
    newest = await snapshot(client, model, 8, 3, kind="inflight")
    assert [await drawn(client, name) for name in (before, moving, newest)] == [5, 7, 7]


async def test_old_snapshots_are_let_go_and_say_so(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "SNAPSHOTS", 2)
    model = await client.model()
    names = [await snapshot(client, model, seq, seq) for seq in (1, 2)]
    await drawn(client, names[0])
    names.append(await snapshot(client, model, 3, 3))
    assert [await drawn(client, names[index]) for index in (0, 2)] == [0, 0]
    result = await client.result(await client.post("asample", sample_body(names[1])))
    assert result["category"] == "user"
    assert "was unnamed and is let go" in result["error"]


async def test_named_samplers_come_back_from_their_checkpoints(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "NAMED", 1)
    model = await client.model()
    session = model.partition(":")[0]
    paths = []
    for number in range(3):
        await trained(client, model, 3 * number + 1, 5)
        body = {"model_id": model, "seq_id": 3 * number + 3, "path": f"n{number}"}
        saved = await client.result(await client.post("save_weights_for_sampler", body))
        paths.append(saved["path"])
    samplers = [
        await sampling_session(
            client, session_id=session, model_path=path, sampling_session_seq_id=number
        )
        for number, path in enumerate(paths)
    ]
    assert [await drawn(client, sampler) for sampler in samplers * 2] == [5, 10, 15] * 2
    assert "load sampler" in client.backend.calls
    answer = await client.http.get(f"samplers/{samplers[0]}")
    assert answer.json() == {
        "sampler_id": samplers[0],
        "base_model": "none",
        "model_path": paths[0],
    }


async def test_a_name_for_sampling_is_taken_once(client: Client) -> None:
    model = await client.model()
    body = {"model_id": model, "path": "x"}
    results = [
        await client.result(await client.post("save_weights_for_sampler", body | {"seq_id": seq}))
        for seq in (1, 2)
    ]
    assert results[0]["path"] == f"tinker://{model}/sampler_weights/x"
    assert "already" in results[1]["error"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"model_path": "tinker://m/weights/x"}, "there is no checkpoint"),
        ({"model_path": "x"}, "is not the URI"),
        ({"base_model": "other"}, "does not serve 'other'"),
        ({}, "model_path: is missing"),
    ],
)
async def test_samplers_that_cannot_be_made(client: Client, body: Any, said: str) -> None:
    session = (await client.post("create_session", {}))["session_id"]
    body = {"session_id": session, "sampling_session_seq_id": 0} | body
    answer = await client.http.post("create_sampling_session", json=body)
    assert (answer.status_code, said in answer.json()["detail"]) == (400, True)


# -- checkpoints -------------------------------------------------------------------------------


async def test_a_load_waits_for_the_save_before_it(client: Client) -> None:
    model = await client.model()
    path = f"tinker://{model}/weights/x"
    tickets = [
        await client.train(model, 1, 5),
        await client.step(model, 2),
        await client.post("save_weights", {"model_id": model, "seq_id": 3, "path": "x"}),
        await client.train(model, 4, 2),
        await client.step(model, 5),
        await client.post(
            "load_weights", {"model_id": model, "seq_id": 6, "path": path, "optimizer": True}
        ),
    ]
    assert await client.weights(model, 7) == 5
    results = [await client.result(ticket) for ticket in tickets]
    assert results[2]["path"] == path
    assert results[5] == {"path": path, "model_id": model, "type": "load_weights"}


async def test_a_new_model_from_a_checkpoint(client: Client) -> None:
    model = await client.model()
    session = model.partition(":")[0]
    await trained(client, model, 1, 5)
    save = {"model_id": model, "seq_id": 3, "path": "x", "user_metadata": {"a": "b"}}
    path = (await client.result(await client.post("save_weights", save)))["path"]
    load = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    tickets = [await client.post("load_weights", load) for _ in range(2)]
    assert tickets[0] == tickets[1]
    loaded = (await client.result(tickets[0]))["model_id"]
    assert loaded == f"{session}:train:1"
    assert await client.weights(loaded, 1) == 5
    assert (await client.post("get_info", {"model_id": loaded}))["lora_rank"] == 4
    missing = load | {"model_seq_id": 2, "path": path + "y"}
    failed = await client.result(await client.post("load_weights", missing))
    assert (failed["category"], "there is no checkpoint" in failed["error"]) == ("user", True)
    answer = await client.http.post("get_info", json={"model_id": f"{session}:train:2"})
    assert "could not be made: path: there is no checkpoint" in answer.json()["detail"]


async def test_overwriting_only_when_asked_to(client: Client) -> None:
    model = await client.model()
    body = {"model_id": model, "path": "x"}
    saves = [{"seq_id": 1}, {"seq_id": 2}, {"seq_id": 3, "overwrite": True}]
    tickets = [await client.post("save_weights", body | save) for save in saves]
    results = [await client.result(ticket) for ticket in tickets]
    assert ["error" in result for result in results] == [False, True, False]


async def test_listing_fetching_and_deleting_checkpoints(client: Client) -> None:
    model = await client.model()
    for seq, path in ((1, "save_weights"), (2, "save_weights_for_sampler")):
        await client.result(
            await client.post(path, {"model_id": model, "seq_id": seq, "path": f"n{seq}"})
        )
    run = f"training_runs/{model}/checkpoints"
    listed = types.CheckpointsListResponse.model_validate_json((await client.http.get(run)).content)
    assert [(c.checkpoint_id, c.checkpoint_type) for c in listed.checkpoints] == [
        ("weights/n1", "training"),
        ("sampler_weights/n2", "sampler"),
    ]
    everything = await client.http.get("checkpoints?limit=1&offset=1")
    assert [c["checkpoint_id"] for c in everything.json()["checkpoints"]] == ["weights/n1"]
    assert everything.json()["cursor"] == {"offset": 1, "limit": 1, "total_count": 2}
    archive = await client.http.get(f"{run}/weights/n1/archive")
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        assert tar.getnames() == ["adapter_config.json"]
    info = await client.post("weights_info", {"tinker_path": f"tinker://{model}/weights/n1"})
    assert types.WeightsInfoResponse.model_validate(info).lora_rank == 4
    assert (await client.http.delete(f"{run}/weights/n1")).status_code == 204
    assert (await client.http.delete(f"{run}/weights/n1")).status_code == 404
    assert (await client.http.get("checkpoints?limit=x")).status_code == 400


@pytest.mark.parametrize("where", ["folder", "memory://sweep"])
async def test_what_has_expired_goes_by_itself(
    tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the start what expired meanwhile; then whatever expires next, set so or saved so."""
    place = str(tmp_path) if where == "folder" else f"{where}-{tmp_path.name}"
    first = await start(place, ScriptedBackend())
    model = await first.model()
    for seq, name in enumerate(("over", "soon", "kept"), 1):
        body = {"model_id": model, "seq_id": seq, "path": name}
        await first.result(await first.post("save_weights", body))
    store, now = first.engine.store, datetime.now(UTC)
    first.engine.stop()
    for name, seconds in (("over", 0), ("soon", 0.4)):
        expires = now + timedelta(seconds=seconds)
        store.set_flags(CheckpointUri(model, "weights", name), expires=expires)
    second = await start(place, ScriptedBackend())
    other = await second.model()
    monkeypatch.setattr(checkpoints, "timedelta", lambda seconds: timedelta(seconds=seconds / 9000))
    save = {"model_id": other, "seq_id": 1, "path": "new", "ttl_seconds": 3600}
    path = (await second.result(await second.post("save_weights", save)))["path"]
    async with asyncio.timeout(10):
        while len(store._store.keys()) > 2:
            await asyncio.sleep(0.02)
    assert [manifest.name for manifest in store.manifests()] == ["kept"]
    load = {"model_id": other, "seq_id": 2, "path": path}
    failed = await second.result(await second.post("load_weights", load))
    assert failed["category"] == "user"
    assert "there is no checkpoint" in failed["error"]
    assert "it may have expired" in failed["error"]
    second.engine.stop()


# -- ends --------------------------------------------------------------------------------------


async def test_a_session_that_ends_frees_what_it_made(client: Client) -> None:
    model = await client.model()
    session = model.partition(":")[0]
    sampler = await snapshot(client, model, 1, 0)
    client.backend.gate.clear()
    running, waiting = await client.train(model, 2, 5), await client.step(model, 3)
    finish = {"reason": {"type": "success"}}
    answer = await client.http.post(f"sessions/{session}/finish", json=finish)
    assert (answer.status_code, answer.content) == (204, b"")
    client.backend.gate.set()
    assert "its session has ended" in (await client.result(waiting))["error"]
    await client.result(running)
    checks: list[tuple[Callable[..., Awaitable[httpx.Response]], str, Any, int]] = [
        (client.http.post, "session_heartbeat", {"session_id": session}, 410),
        (client.http.post, f"sessions/{session}/finish", finish, 204),
        (client.http.post, "get_info", {"model_id": model}, 404),
        (client.http.post, "asample", sample_body(sampler), 404),
    ]
    for call, path, body, status in checks:
        assert (await call(path, json=body)).status_code == status, path
    await client.model()
    assert not client.backend.has_model(model)
    assert not client.backend.has_sampler(sampler)


async def test_unloading_comes_after_what_was_queued(client: Client) -> None:
    model = await client.model()
    stepped = [await client.train(model, 1, 5), await client.step(model, 2)]
    unloaded = await client.post("unload_model", {"model_id": model})
    assert (await client.result(unloaded))["model_id"] == model
    assert (await client.result(stepped[1]))["metrics"]
    assert client.backend.calls == ["create 4", "train 5", "step 5", "delete"]
    answer = await client.http.post("get_info", json={"model_id": model})
    assert f"model {model}: was unloaded; go on from a saved" in answer.json()["detail"]


async def test_checkpoints_outlive_the_engine(client: Client, tmp_path: Path) -> None:
    model = await client.model()
    await trained(client, model, 1, 5)
    save = {"model_id": model, "seq_id": 3, "path": "x"}
    path = (await client.result(await client.post("save_weights", save)))["path"]
    second = await start(tmp_path, ScriptedBackend())
    answer = await second.http.post("get_info", json={"model_id": model})
    assert (answer.status_code, "restarted" in answer.json()["detail"]) == (404, True)
    session = (await second.post("create_session", {}))["session_id"]
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
    loaded = (await second.result(await second.post("load_weights", load)))["model_id"]
    assert await second.weights(loaded, 1) == 5
    second.engine.stop()
