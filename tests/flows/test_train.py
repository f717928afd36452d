"""The train flow on the mock backend and a real Prefect server: order, resume, modes, refusals."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from algorithms.callbacks import Callback
from algorithms.experiment import Experiment
from backends.errors import StateLostError, TransientError, UserError
from tests.servers.prefect import PrefectServer

ROWS = [{"prompt": f"What is {i} + {i}?", "completion": str(2 * i)} for i in range(20)]


def experiment(store: Path, **changes: Any) -> Experiment:
    document: dict[str, Any] = {
        "name": "mock",
        "store": str(store),
        "model": {"name": "examples/models/tiny-qwen3"},
        "data": {"kind": "rows", "rows": ROWS},
        "algorithm": {
            "kind": "mock_sft",
            "params": {"batch_size": 4, "max_steps": 12, "save_every": 4},
        },
        "evaluations": [{"name": "val", "data": {"kind": "rows", "rows": ROWS}, "every": 6}],
    }
    return Experiment.model_validate(document | changes)


async def run(spec: Experiment, run_id: str) -> dict[str, Any]:
    from flows.train import train

    result = await train(spec, run_id)
    assert isinstance(result, dict)
    return result


def metrics(store: Path, run_id: str) -> list[dict[str, float]]:
    """metrics.jsonl without what a clock put in."""
    lines = (store / run_id / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def adapter(store: Path, run_id: str, step: int) -> bytes:
    return (store / run_id / f"checkpoints/step-{step:06d}/adapter_model.safetensors").read_bytes()


class Stop(StateLostError):
    """What the test interrupts a run with: an error that no task retries."""


async def run_until(spec: Experiment, run_id: str, step: int, monkeypatch: Any) -> None:
    """Start a run and break it in the middle of a step."""
    from algorithms.mock_sft import MockSFT

    real = MockSFT.build_batch

    async def build_batch(self: MockSFT, step_idx: int) -> Any:
        if step_idx == step:
            raise Stop(f"stopped at step {step}")
        return await real(self, step_idx)

    with monkeypatch.context() as patch:
        patch.setattr(MockSFT, "build_batch", build_batch)
        with pytest.raises(Stop):
            await run(not_recovering(spec), run_id)


def not_recovering(spec: Experiment) -> Experiment:
    """The same experiment, which ends when the model's state is lost."""
    orchestration = spec.orchestration.model_copy(update={"max_recoveries": 0})
    return spec.model_copy(update={"orchestration": orchestration})


async def test_a_run_leaves_its_whole_story_in_its_folder(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    result = await run(experiment(tmp_path), "a")
    folder = tmp_path / "a"
    assert result["status"] == "completed"
    assert result == json.loads((folder / "result.json").read_text())
    assert [row["step"] for row in metrics(tmp_path, "a")] == list(range(1, 13))
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["step-000004", "step-000008", "step-000012"]
    scored = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [row["step"] for row in scored] == [0, 6, 12]
    manifest = json.loads((folder / "checkpoints/step-000008/manifest.json").read_text())
    assert manifest["next_step"] == 8
    lineage = manifest["algorithm_state"].pop("lineage")
    assert set(lineage) == {"name", "made_by"}
    assert manifest["algorithm_state"] == {"epoch": 1, "step_in_epoch": 3}
    assert manifest["metrics"]["step"] == 8
    assert (folder / "report.md").read_text().startswith("#")


async def test_operations_and_segments_train_the_same(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    for mode in ("operation", "segment"):
        await run(experiment(tmp_path, orchestration={"task_runs": mode}), mode)
    assert adapter(tmp_path, "operation", 12) == adapter(tmp_path, "segment", 12)
    assert metrics(tmp_path, "operation") == metrics(tmp_path, "segment")


@pytest.mark.parametrize("stopped_at", [1, 4, 7, 11])
@pytest.mark.parametrize("mode", ["operation", "segment"])
async def test_a_resumed_run_ends_like_one_never_stopped(
    prefect_server: PrefectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stopped_at: int,
    mode: str,
) -> None:
    spec = experiment(tmp_path, orchestration={"task_runs": mode})
    await run(spec, "whole")
    await run_until(spec, "broken", stopped_at, monkeypatch)
    assert json.loads((tmp_path / "broken/result.json").read_text())["status"] == "failed"
    result = await run(spec, "broken")
    assert result["status"] == "completed"
    assert adapter(tmp_path, "broken", 12) == adapter(tmp_path, "whole", 12)
    assert metrics(tmp_path, "broken") == metrics(tmp_path, "whole")
    evaluations = [
        (tmp_path / name / "evaluations.jsonl").read_text() for name in ("whole", "broken")
    ]
    assert evaluations[0] == evaluations[1]


async def test_a_finished_run_gives_its_result_and_trains_nothing(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    first = await run(experiment(tmp_path), "a")
    stamp = (tmp_path / "a/metrics.jsonl").stat().st_mtime_ns
    assert await run(experiment(tmp_path), "a") == first
    assert (tmp_path / "a/metrics.jsonl").stat().st_mtime_ns == stamp


async def test_another_experiment_may_not_take_over_a_run(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_until(experiment(tmp_path), "a", 6, monkeypatch)
    other = experiment(tmp_path, seed=1)
    with pytest.raises(UserError, match="seed: run 'a' was started with 0, not 1"):
        await run(other, "a")
    rows = {"kind": "rows", "rows": ROWS[:-1]}
    with pytest.raises(UserError, match=r"data\.rows"):
        await run(experiment(tmp_path, data=rows), "a")


async def test_a_run_of_an_earlier_version_is_continued(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its experiment lacks the fields that are new since."""
    await run_until(experiment(tmp_path), "a", 6, monkeypatch)
    file = tmp_path / "a/experiment.yaml"
    written = file.read_text()
    assert "lora_rank" in written
    file.write_text("".join(line for line in written.splitlines(True) if "lora_rank" not in line))
    assert (await run(experiment(tmp_path), "a"))["status"] == "completed"


def fail_once(monkeypatch: pytest.MonkeyPatch, step: int, error: Exception) -> list[int]:
    """Have the first build of a step's batch fail; returns the steps as they are built."""
    from algorithms.mock_sft import MockSFT

    real = MockSFT.build_batch
    built: list[int] = []

    async def build_batch(self: MockSFT, step_idx: int) -> Any:
        built.append(step_idx)
        if step_idx == step and built.count(step) == 1:
            raise error
        return await real(self, step_idx)

    monkeypatch.setattr(MockSFT, "build_batch", build_batch)
    return built


async def test_rows_that_changed_since_a_run_began_are_refused(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.jsonl"
    spec = experiment(tmp_path, data={"kind": "jsonl", "path": str(file)})
    file.write_text("\n".join(map(json.dumps, ROWS)))
    await run_until(spec, "a", 6, monkeypatch)
    file.write_text("\n".join(map(json.dumps, reversed(ROWS))))
    with pytest.raises(UserError, match="was started on other rows"):
        await run(spec, "a")


@pytest.mark.parametrize(("at", "kept"), [(6, [4]), (12, [4, 8])])
async def test_a_checkpoint_waits_for_the_evaluations_before_it(
    prefect_server: PrefectServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: int,
    kept: list[int],
) -> None:
    """A run that ends while it evaluates must find that evaluation still to be done."""
    from algorithms import run as loop
    from backends.storage.run_store import RunStore

    real = loop.evaluate

    async def evaluate(prepared: Any, client: Any, step: int) -> Any:
        if step == at:
            await asyncio.sleep(1.0)  # the steps and the save behind it are long done
            raise Stop("while evaluating")
        return await real(prepared, client, step)

    await run(experiment(tmp_path), "whole")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluate", evaluate)
        with pytest.raises(Stop):
            await run(not_recovering(experiment(tmp_path)), "broken")
    assert RunStore(tmp_path, "broken").checkpoint_steps() == kept
    await run(experiment(tmp_path), "broken")
    whole, broken = (
        (tmp_path / name / "evaluations.jsonl").read_text() for name in ("whole", "broken")
    )
    assert broken == whole
    assert metrics(tmp_path, "broken") == metrics(tmp_path, "whole")


async def test_a_retried_flow_run_continues_its_own_run(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.train import train

    await run(experiment(tmp_path), "whole")
    built = fail_once(monkeypatch, 6, Stop("once"))
    result = await train.with_options(retries=1)(not_recovering(experiment(tmp_path)))
    assert isinstance(result, dict)
    assert result["status"] == "completed"
    run_id = result["run_id"]
    assert metrics(tmp_path, run_id) == metrics(tmp_path, "whole")
    assert adapter(tmp_path, run_id, 12) == adapter(tmp_path, "whole", 12)
    assert [built.count(step) for step in (0, 3, 4, 11)] == [1, 1, 2, 1]


async def test_a_batch_that_could_not_be_built_for_now_is_built_again(
    prefect_server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = fail_once(monkeypatch, 6, TransientError("the rows are away"))
    result = await run(experiment(tmp_path, evaluations=[]), "a")
    assert result["status"] == "completed"
    assert built == [0, 1, 2, 3, 4, 5, 6, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("kind", ["folder", "object store"])
async def test_a_run_can_start_from_the_weights_of_another(
    prefect_server: PrefectServer, tmp_path: Path, kind: str
) -> None:
    store = str(tmp_path) if kind == "folder" else f"memory://{tmp_path.name}"
    first = experiment(tmp_path).model_copy(update={"store": store})
    result = await run(first, "a")
    model = {"name": "any/model", "init_from": result["artifacts"]["adapter"]}
    await run(experiment(tmp_path, model=model), "b")
    await run(experiment(tmp_path), "fresh")
    # The same rows come first, so the new run begins where the other one had come to, with an
    # optimizer that is new: better than fresh weights, and not simply going on.
    begun = [metrics(tmp_path, name)[0]["train_mean_nll"] for name in ("b", "fresh")]
    assert begun[0] < begun[1]
    manifest = json.loads((tmp_path / "b/checkpoints/step-000004/manifest.json").read_text())
    assert manifest["next_step"] == 4


class Watcher(Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_step(self, row: Any) -> None:
        self.seen.append(f"step {row['step']}")
        raise RuntimeError("a callback's own mistake")

    def on_save(self, step: int, uri: str) -> None:
        self.seen.append(f"save {step}")


async def test_a_callback_sees_everything_and_its_failure_does_not_end_the_run(
    prefect_server: PrefectServer, tmp_path: Path
) -> None:
    from tasks import session

    watcher = Watcher()
    with session.watch(watcher):
        result = await run(experiment(tmp_path), "a")
    assert result["status"] == "completed"
    steps = [seen for seen in watcher.seen if seen.startswith("step")]
    assert steps == [f"step {step}" for step in range(1, 13)]
    assert [seen for seen in watcher.seen if seen.startswith("save")] == [
        "save 4",
        "save 8",
        "save 12",
    ]


@pytest.mark.parametrize("task_runs", ["operation", "segment"])
async def test_a_run_that_a_callback_ends_early_is_complete(
    prefect_server: PrefectServer, tmp_path: Path, task_runs: str
) -> None:
    stopping = {"metric": "optim/lr", "mode": "max", "patience": 4}
    spec = experiment(
        tmp_path,
        callbacks=[{"kind": "early_stopping", "params": stopping}],
        orchestration={"task_runs": task_runs},
    )
    result = await run(spec, "a")
    assert result["status"] == "completed"
    assert result["ended_early"] == "optim/lr was no better than 0.0001, of step 1, for 4 steps"
    assert [row["step"] for row in metrics(tmp_path, "a")] == [1, 2, 3, 4, 5, 6]
    assert result["artifacts"]["checkpoint"].endswith("step-000006")
    assert "completed early: optim/lr was no better" in (tmp_path / "a/report.md").read_text()
    assert await run(spec, "a") == result
