"""A run that loses its engine, its lease or its patience, against a real Prefect server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from algorithms.callbacks import Callback
from algorithms.experiment import Experiment
from algorithms.run import LiveRun
from backends.errors import FlowtuneError, Problem, StateLostError, TransientError, UserError
from backends.mock import MockBackend, MockKind
from backends.storage.lease import LeaseLost
from backends.storage.run_store import RunStore
from backends.waiting import WAITS
from tests.algorithms.sampling_algorithm import Sampling
from tests.flows.test_train import adapter, experiment, metrics, run
from tests.servers.prefect import PrefectServer


def evaluations(store: Path, run_id: str) -> str:
    return (store / run_id / "evaluations.jsonl").read_text()


def same(store: Path, run_id: str, other: str, last: int = 12) -> None:
    """Both runs ended with the same bits, rows and scores."""
    assert adapter(store, run_id, last) == adapter(store, other, last)
    assert metrics(store, run_id) == metrics(store, other)
    assert evaluations(store, run_id) == evaluations(store, other)


def failing(
    monkeypatch: pytest.MonkeyPatch, method: str, calls: set[int], error: FlowtuneError
) -> None:
    """Have some calls of a backend's method fail, counted from 1 over all backends."""
    real: Callable[..., Awaitable[Any]] = getattr(MockBackend, method)
    count = 0

    def call(self: MockBackend, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        nonlocal count
        count += 1
        result = real(self, *args, **kwargs)
        return _lost(result, error) if count in calls else result

    monkeypatch.setattr(MockBackend, method, call)


async def _lost(result: Awaitable[Any], error: FlowtuneError) -> Any:
    """Applied at the server, and the answer is an error."""
    await result
    raise error


def sampling(store: Path, **changes: Any) -> Experiment:
    params = {"batch_size": 4, "max_steps": 12, "save_every": 4, "group_size": 2}
    algorithm = {"kind": "sampling", "params": params}
    return experiment(store, algorithm=algorithm, backend={"kind": "mock"}, **changes)


def mode(name: str) -> dict[str, Any]:
    return {"orchestration": {"task_runs": name}}


@pytest.mark.parametrize("task_runs", ["operation", "segment"])
@pytest.mark.parametrize(
    ("method", "call"),
    [
        ("optim_step_async", 7),
        ("forward_backward_async", 3),
        ("save_full_state", 2),
        ("snapshot_sampling_client", 2),
    ],
)
async def test_a_lost_state_takes_the_run_back_to_its_last_checkpoint(
    prefect_server: PrefectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task_runs: str,
    method: str,
    call: int,
) -> None:
    spec = experiment(tmp_path, **mode(task_runs))
    await run(spec, "whole")
    failing(monkeypatch, method, {call}, StateLostError("the engine was killed by signal 9"))
    result = await run(spec, "lost")
    assert result["status"] == "completed"
    assert result["recoveries"] == 1
    same(tmp_path, "lost", "whole")


async def test_an_optimizer_step_without_an_answer_is_not_tried_again_but_replayed(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(experiment(tmp_path), "whole")
    failing(monkeypatch, "optim_step_async", {6}, TransientError("no answer after ten minutes"))
    result = await run(experiment(tmp_path), "lost")
    assert result["recoveries"] == 1
    same(tmp_path, "lost", "whole")
    event = await recovered_event(prefect_server, "lost")
    assert event["payload"] == {"cause": "no answer after ten minutes", "step": 4, "recoveries": 1}
    assert {related["prefect.resource.role"] for related in event["related"]} >= {"flow-run"}


async def recovered_event(server: PrefectServer, run_id: str) -> dict[str, Any]:
    """The event of a recovery, once the server has written it down."""
    wanted = {"filter": {"resource": {"id": [f"flowtune.run.{run_id}"]}}}
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(30):
        while True:
            answer = await client.post(f"{server.api_url}/events/filter", json=wanted)
            if found := answer.json()["events"]:
                event: dict[str, Any] = found[0]
                return event
            await asyncio.sleep(0.3)


async def test_recoveries_are_bounded_and_counted(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import recovery

    monkeypatch.setattr(recovery, "WAITS_SECONDS", (0.0,))
    spec = experiment(tmp_path, orchestration={"max_recoveries": 2})
    failing(monkeypatch, "optim_step_async", set(range(6, 99)), StateLostError("out of memory"))
    with pytest.raises(StateLostError, match="out of memory") as raised:
        await run(spec, "a")
    assert "recovered 2 times" in raised.value.__notes__[0]
    result = json.loads((tmp_path / "a/result.json").read_text())
    assert (result["status"], result["recoveries"]) == ("failed", 2)
    assert RunStore(tmp_path, "a").checkpoint_steps() == [4]


async def test_a_checkpoint_gives_a_run_its_recoveries_back(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import session

    class Saves(Callback):
        def __init__(self) -> None:
            self.of = {step: asyncio.Event() for step in (0, 4, 8, 12)}
            self.of[0].set()

        def on_save(self, step: int, uri: str) -> None:
            self.of[step].set()

    saves, lost = Saves(), {1, 5, 9}
    real = LiveRun.optim_step

    async def optim_step(self: LiveRun, step: int) -> Any:
        result = await real(self, step)
        if step in lost:
            lost.remove(step)
            await saves.of[step - 1].wait()
            raise StateLostError("out of memory")
        return result

    monkeypatch.setattr(LiveRun, "optim_step", optim_step)
    with session.watch(saves):
        result = await run(experiment(tmp_path, orchestration={"max_recoveries": 1}), "a")
    assert (result["status"], result["recoveries"]) == ("completed", 3)


async def test_a_run_that_is_lost_while_it_opens_is_opened_again(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the same bound as later, for the opened run went no further than the first."""
    from tasks import recovery

    monkeypatch.setattr(recovery, "WAITS_SECONDS", (0.0,))
    opened = 0
    real = MockKind.open

    async def open_mock(*args: Any) -> MockBackend:
        nonlocal opened
        opened += 1
        if opened <= 2:
            raise StateLostError("the engine was killed by signal 9")
        return await real(*args)

    monkeypatch.setattr(MockKind, "open", open_mock)
    with pytest.raises(StateLostError, match="signal 9") as raised:
        await run(experiment(tmp_path, orchestration={"max_recoveries": 1}), "a")
    assert "recovered 1 times" in raised.value.__notes__[0]
    opened = 0
    result = await run(experiment(tmp_path, orchestration={"max_recoveries": 2}), "a")
    assert (result["status"], result["recoveries"]) == ("completed", 2)
    event = await recovered_event(prefect_server, "a")
    assert event["payload"] == {
        "cause": "the engine was killed by signal 9",
        "step": 0,
        "recoveries": 2,
    }


async def test_a_users_mistake_is_never_recovered_from(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake = UserError(Problem("backend", "the loss needs weights"))
    failing(monkeypatch, "forward_backward_async", {3}, mistake)
    with pytest.raises(UserError, match="the loss needs weights"):
        await run(experiment(tmp_path), "a")
    result = json.loads((tmp_path / "a/result.json").read_text())
    assert (result["status"], result["recoveries"]) == ("failed", 0)


async def test_a_replay_takes_its_own_samples_out_of_the_store(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(sampling(tmp_path), "whole")
    Sampling.sampled.clear()
    failing(monkeypatch, "optim_step_async", {7}, StateLostError("gone"))
    result = await run(sampling(tmp_path), "lost")
    assert result["recoveries"] == 1
    assert Sampling.sampled == list(range(12))
    same(tmp_path, "lost", "whole")


async def test_what_the_server_lets_a_run_wait_for_is_shown(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    from tasks import session

    class Watcher(Callback):
        notices: ClassVar[list[str]] = []

        def on_step(self, row: Any) -> None:
            if row["step"] == 5:
                WAITS.queue_state("paused_capacity", "all GPUs are in use")
                WAITS.queue_state("active", None)

        def on_notice(self, words: str) -> None:
            self.notices.append(words)

    with session.watch(Watcher()):
        result = await run(experiment(tmp_path), "a")
    assert result["status"] == "completed"
    paused = "the server has paused this run's requests: all GPUs are in use"
    assert Watcher.notices == [paused, "the server goes on after 0 s"]
    await logged(prefect_server, f"run a: {paused}")


async def logged(server: PrefectServer, message: str) -> None:
    """Wait until Prefect shows a line of a run's log."""
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(30):
        while True:
            answer = await client.post(
                f"{server.api_url}/logs/filter", json={"sort": "TIMESTAMP_DESC"}
            )
            if message in [row["message"] for row in answer.json()]:
                return
            await asyncio.sleep(0.3)


async def test_a_run_that_was_taken_over_ends_and_writes_nothing_more(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    from tasks import session

    class Thief(Callback):
        written: bytes | None = None

        def on_save(self, step: int, uri: str) -> None:
            if step == 4:
                RunStore(tmp_path, "a").take_lease("http://prefect/runs/the-other")
                self.written = (tmp_path / "a/metrics.jsonl").read_bytes()

    thief = Thief()
    with session.watch(thief), pytest.raises(LeaseLost, match="http://prefect/runs/the-other"):
        await run(experiment(tmp_path), "a")
    assert (tmp_path / "a/metrics.jsonl").read_bytes() == thief.written
    assert not (tmp_path / "a/result.json").exists()
    assert RunStore(tmp_path, "a").checkpoint_steps() == [4]


async def test_a_run_that_is_asked_to_stop_saves_and_is_cancelled(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    from flows.train import train
    from tasks import session

    class Cancel(Callback):
        notices: ClassVar[list[str]] = []

        def on_step(self, row: Any) -> None:
            if row["step"] == 6:
                os.kill(os.getpid(), signal.SIGINT)

        def on_notice(self, words: str) -> None:
            self.notices.append(words)

    await run(experiment(tmp_path), "whole")
    slow = {"kind": "mock", "params": {"step_seconds": 0.05}}
    spec = experiment(tmp_path, backend=slow)
    with session.watch(Cancel()):
        state: Any = await train(spec, "a", return_state=True)
    assert state.is_cancelled()
    assert Cancel.notices == ["stopping: a checkpoint is written first (Ctrl-C again: at once)"]
    result = json.loads((tmp_path / "a/result.json").read_text())
    assert result["status"] == "cancelled"
    *_, last = RunStore(tmp_path, "a").checkpoint_steps()
    assert 6 <= last < 12
    assert [row["step"] for row in metrics(tmp_path, "a")] == list(range(1, last + 1))
    assert (await run(spec, "a"))["status"] == "completed"
    same(tmp_path, "a", "whole")


async def test_a_killed_engine_costs_the_steps_since_the_last_checkpoint(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real engine, on-policy: the same samples and the same bits.

    A first engine is killed while it still loads, a second one in the midst of the steps.
    """
    from tasks import recovery, session

    monkeypatch.setattr(recovery, "WAITS_SECONDS", (0.0,))
    real = asyncio.create_subprocess_exec
    engines: list[asyncio.subprocess.Process] = []

    async def killed_at_first(*args: Any, **kwargs: Any) -> asyncio.subprocess.Process:
        process = await real(*args, **kwargs)
        engines.append(process)
        if len(engines) == 1:
            process.kill()
        return process

    class Killer(Callback):
        killed: bool = False

        def on_step(self, row: Any) -> None:
            if row["step"] == 5 and not self.killed:
                self.killed = True
                backend: Any = session.live("lost").backend
                backend.engine.process.kill()

    params = {"batch_size": 2, "max_steps": 7, "save_every": 3, "lora_rank": 4, "max_tokens": 4}
    rows = [{"prompt": f"{i} + {i} =", "completion": f" {2 * i}"} for i in range(6)]
    spec = experiment(
        tmp_path,
        algorithm={"kind": "sampling", "params": params},
        backend={"kind": "embedded", "params": {"threads": 1}},
        evaluations=[{"name": "val", "data": {"kind": "rows", "rows": rows}, "max_tokens": 4}],
    )
    await run(spec, "whole")
    Sampling.sampled.clear()
    monkeypatch.setattr(asyncio, "create_subprocess_exec", killed_at_first)
    with session.watch(Killer()):
        result = await run(spec, "lost")
    assert [engine.returncode for engine in engines[:2]] == [-signal.SIGKILL] * 2
    assert (len(engines), result["recoveries"]) == (3, 2)
    assert Sampling.sampled == list(range(7))
    same(tmp_path, "lost", "whole", last=7)
