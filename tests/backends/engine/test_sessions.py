"""Sessions that end without a word: what counts as a sign of life, what is freed, what is told.

The first part is raw, over a scripted backend; the second is an engine in a process of its own.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tinker
from backend_contract import write_base_model
from engine_process import KEY, engine
from scripted_backend import ScriptedBackend
from test_api import Client, drawn, sample_body, snapshot, start, trained
from tinker import types

from backends.engine import api, ledger, models

LIMIT = 0.6
"""Seconds."""


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    client = await start(tmp_path, ScriptedBackend(), session_seconds=LIMIT)
    yield client
    client.backend.gate.set()
    client.engine.stop()
    assert await client.engine.stopped(5)
    await client.http.aclose()


class Clock:
    """The time that sessions go by, which stands still but for what a test adds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (ledger, models):
            monkeypatch.setattr(module, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def lapse(client: Client, session: str) -> None:
    """Wait for a session's end, without a request."""
    known = client.engine.ledger
    async with asyncio.timeout(20 * LIMIT):
        while (found := known.find_session(session)) is None or found.ended is None:
            await asyncio.sleep(0.01)
    # What is freed is freed by jobs on the compute thread, which come before this one.
    await client.engine.scheduler.call(lambda: None)


async def test_what_it_made_is_freed_and_it_is_told(client: Client) -> None:
    model = await client.model()
    session = model.partition(":")[0]
    await trained(client, model, 1, 5)
    save = {"model_id": model, "seq_id": 3, "path": "x"}
    path = (await client.result(await client.post("save_weights", save)))["path"]
    unnamed, moving = [
        await snapshot(client, model, seq, seq, kind=kind)
        for seq, kind in ((4, "snapshot"), (5, "inflight"))
    ]
    named = save | {"seq_id": 6}
    sampled = (await client.result(await client.post("save_weights_for_sampler", named)))["path"]
    started = time.monotonic()
    await lapse(client, session)
    assert time.monotonic() - started > 0.9 * LIMIT
    backend = client.backend
    assert not backend.has_model(model)
    assert not backend.has_sampler(unnamed)
    assert not backend.has_sampler(f"{model}:inflight")
    said = f"expired after {LIMIT} s without a sign of life"
    step = {"model_id": model, "seq_id": 7, "adam_params": {}}
    calls: list[tuple[str, Any, int, str]] = [
        ("session_heartbeat", {"session_id": session}, 410, f"session {session} {said}; open a"),
        (
            "create_model",
            {"session_id": session, "model_seq_id": 1, "base_model": "none"},
            410,
            said,
        ),
        (
            "get_info",
            {"model_id": model},
            404,
            f"its session {said}; go on from a saved checkpoint",
        ),
        ("optim_step", step, 404, said),
        ("asample", sample_body(moving), 404, "go on from a saved checkpoint"),
    ]
    for call, body, status, told in calls:
        answer = await client.http.post(call, json=body)
        assert (answer.status_code, told in answer.json()["detail"]) == (status, True), answer.text
    session = (await client.post("create_session", {}))["session_id"]
    load = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": True}
    loaded = (await client.result(await client.post("load_weights", load)))["model_id"]
    assert await client.weights(loaded, 1) == 5
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "model_path": sampled}
    sampler = (await client.post("create_sampling_session", sampling))["sampling_session_id"]
    assert await drawn(client, sampler) == 5


async def test_every_request_is_a_sign_of_life(client: Client, clock: Clock) -> None:
    session = (await client.post("create_session", {}))["session_id"]
    other = (await client.post("create_session", {}))["session_id"]
    model = await client.model(0, session)
    ticket = await client.train(model, 1, 5)
    await client.result(ticket)
    signs = [
        ("session_heartbeat", {"session_id": session}),
        ("get_info", {"model_id": model}),
        ("retrieve_future", ticket),
        ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 1}),
    ]
    for path, body in signs * 2:
        clock.now += 0.7 * LIMIT
        await client.http.post(path, json=body)
        client.engine.models._end_lapsed()
    assert client.backend.has_model(model)
    answer = await client.http.post("session_heartbeat", json={"session_id": other})
    assert answer.status_code == 410
    clock.now += LIMIT
    client.engine.models._end_lapsed()
    await lapse(client, session)
    assert not client.backend.has_model(model)


async def test_nothing_ends_while_it_computes(
    client: Client, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what runs, nor what is queued behind it, nor what waits in another session."""
    monkeypatch.setattr(api, "HOLD_SECONDS", 0.01)
    model, other = await client.model(), await client.model()
    client.backend.gate.clear()
    tickets = [
        await client.train(model, 1, 5),
        await client.step(model, 2),
        await client.train(other, 1, 6),
    ]
    clock.now += 10 * LIMIT
    client.engine.models._end_lapsed()
    for ticket in tickets:
        assert (await client.http.post("retrieve_future", json=ticket)).status_code == 408
    client.backend.gate.set()
    monkeypatch.setattr(api, "HOLD_SECONDS", 5)
    for ticket in tickets:
        await client.result(ticket)
    assert await client.weights(model, 3) == 5
    assert await client.weights(other, 2) == 0


async def test_there_is_time_to_fetch_an_answer(client: Client, clock: Clock) -> None:
    """Time runs from the answer on, not from the request, and again from its fetching on."""
    model = await client.model()
    client.backend.gate.clear()
    ticket = await client.train(model, 1, 5)
    clock.now += 2 * LIMIT
    client.backend.gate.set()
    held = client.engine.ledger._tickets[ticket["request_id"]]
    await held.settled.wait()
    for _ in range(2):
        clock.now += 0.7 * LIMIT
        client.engine.models._end_lapsed()
        await client.result(ticket)
    assert await client.weights(model, 2) == 0


async def test_an_answer_that_nobody_fetches_does_not_keep_it(client: Client) -> None:
    model = await client.model()
    ticket = await client.train(model, 1, 5)
    await lapse(client, model.partition(":")[0])
    assert not client.backend.has_model(model)
    assert (await client.result(ticket)).metrics == {"loss:sum": 1.0}


async def test_a_model_that_is_unloaded_stays_in_the_list(client: Client) -> None:
    model = await client.model()
    await client.result(await client.post("unload_model", {"model_id": model}))
    run = types.TrainingRun.model_validate((await client.http.get(f"training_runs/{model}")).json())
    assert (run.training_run_id, run.lora_rank, run.corrupted) == (model, 4, False)
    session = model.partition(":")[0]
    again = {"session_id": session, "model_seq_id": 0, "base_model": "none"}
    await lapse(client, session)
    assert (await client.http.post("create_model", json=again)).status_code == 410
    listed = (await client.http.get("training_runs")).json()["training_runs"]
    assert [run["training_run_id"] for run in listed] == [model]


# -- for real ----------------------------------------------------------------------------------


def resident(pid: int) -> float:
    """MB of memory that a process has to itself."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_client_that_died_leaves_no_memory_behind(tmp_path: Path) -> None:
    """20 models of rank 256 with their optimizers' moments; then the heartbeats stop."""
    base, log = write_base_model(tmp_path / "base"), tmp_path / "log"
    options = ("--session-timeout", "1")
    with engine(base, tmp_path / "store", *options, log=log) as running:
        running.wait_ready()
        service = tinker.ServiceClient(base_url=running.url, api_key=KEY)

        def train(seed: int) -> tinker.TrainingClient:
            making = service.create_lora_training_client(str(base), rank=256, seed=seed)
            client = making.result()
            prompt = types.ModelInput.from_ints([5, 6, 7])
            inputs: dict[str, Any] = {"target_tokens": np.array([6, 7, 8])}
            datum = types.Datum(model_input=prompt, loss_fn_inputs=inputs)
            client.forward_backward([datum], "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
            return client

        client = train(0)  # what torch sets up at the first step stays
        before = resident(running.process.pid)
        for seed in range(20):
            client = train(seed)
        client.save_weights_and_get_sampling_client().result()
        full = resident(running.process.pid)
        assert full > before + 100
        address = f"{running.url}/api/v1/training_runs"
        with httpx.Client(headers={"X-API-Key": KEY}) as http:
            deadline = time.monotonic() + 20
            while "expired, with 21 models made" not in log.read_text():
                assert time.monotonic() < deadline
                http.get(address)  # to look is no sign of life
                time.sleep(0.1)
        with tinker.ServiceClient(base_url=running.url, api_key=KEY) as later:
            later.create_lora_training_client(str(base), rank=1).result()
        assert resident(running.process.pid) < before + 0.1 * (full - before)
        with pytest.raises(tinker.NotFoundError, match="expired after 1 s without a sign of life"):
            client.optim_step(types.AdamParams()).result()
