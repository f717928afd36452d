"""Callbacks: tables, samples, trackers through their own libraries, and those that fail."""

from __future__ import annotations

import asyncio
import csv
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from algorithms.callbacks import Callback, CallbackConfig, CallbackFailed
from algorithms.check import check_experiment
from algorithms.registry import CALLBACKS, register_callback
from algorithms.watchers.tracking import settings_of
from backends.errors import UserError
from tests.algorithms.samples import document
from tests.algorithms.watched import experiment, finished, table


def of_kind(kind: str, **params: Any) -> dict[str, Any]:
    return {"kind": kind, "params": params}


async def broken_off_and_continued(tmp_path: Path, callback: dict[str, Any]) -> None:
    """A run whose process ends behind step 8, and one that goes on from the checkpoint at 4."""
    spec = experiment(tmp_path / "runs", callbacks=[callback])
    first = await finished(spec, until=8)
    for watcher in first.callbacks:
        watcher.on_end(first.fail(RuntimeError("killed")))
    manifest = tmp_path / "runs/a/checkpoints/step-000008/manifest.json"
    manifest.unlink()
    await finished(spec)


# --- tables and samples -------------------------------------------------------------------------


async def test_csv_holds_each_row_once_after_a_resume(tmp_path: Path) -> None:
    await broken_off_and_continued(tmp_path, of_kind("csv", folder=str(tmp_path / "csv")))
    with (tmp_path / "csv/a/metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    kept = table(tmp_path / "runs", "a")
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    for column in ("train_mean_nll", "optim/lr"):
        assert [float(row[column]) for row in rows] == [row[column] for row in kept]
    with (tmp_path / "csv/a/evaluations.csv").open(newline="") as file:
        scored = [(int(row["step"]), row["name"]) for row in csv.DictReader(file)]
    assert sorted(scored) == [(step, "val") for step in (0, 3, 6, 9, 12)]


async def test_a_column_that_comes_late_is_put_into_the_table(tmp_path: Path) -> None:
    from algorithms.watchers.tables import _Table

    columns = _Table(tmp_path / "t.csv", [{"step": 1, "a": 1.5}])
    columns.add({"step": 2, "b": 2.5})
    columns.add({"step": 3, "a": 3.5})
    assert (tmp_path / "t.csv").read_text().split() == ["step,a,b", "1,1.5,", "2,,2.5", "3,3.5,"]


async def test_samples_are_printed_at_each_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await finished(experiment(tmp_path, callbacks=[of_kind("samples", count=1)]))
    shown = capsys.readouterr().out
    assert "val after step 0" in shown
    assert "val after step 12" in shown
    assert "one" in shown
    assert "two" not in shown
    with pytest.raises(UserError, match="which is no evaluation of this experiment"):
        experiment(tmp_path, callbacks=[of_kind("samples", evaluation="vla")])


def the_only(folder: Path, pattern: str) -> Path:
    (path,) = folder.glob(pattern)
    return path


# --- trackers -----------------------------------------------------------------------------------


async def test_tensorboard_has_every_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "tb"
    await broken_off_and_continued(tmp_path, of_kind("tensorboard", folder=str(folder)))
    events = EventAccumulator(str(folder / "a"), purge_orphaned_data=True)
    events.Reload()
    rows = table(tmp_path / "runs", "a")
    found = [(event.step, event.value) for event in events.Scalars("train_mean_nll")]
    assert [step for step, _ in found] == list(range(1, 13))
    assert [value for _, value in found] == pytest.approx([row["train_mean_nll"] for row in rows])
    assert [event.step for event in events.Scalars("val/val/reward/mean")] == [0, 3, 6, 9, 12]


async def test_wandb_offline_keeps_the_run_under_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    params = {"mode": "offline", "folder": str(tmp_path), "project": "p"}
    await finished(experiment(tmp_path / "runs", callbacks=[of_kind("wandb", **params)]))
    file = the_only(tmp_path, "wandb/offline-run-*-a/run-a.wandb")
    words = (b"train_mean_nll", b"val/val/reward/mean", b"algorithm")
    async with asyncio.timeout(20):  # a process of wandb's own writes it, and may do so later
        while not all(word in file.read_bytes() for word in words):
            await asyncio.sleep(0.05)


@pytest.fixture
def mlflow_database(tmp_path: Path) -> str:
    pytest.importorskip("mlflow")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.mark.slow  # MLflow takes ten seconds to make a database
async def test_mlflow_goes_on_with_the_same_run(tmp_path: Path, mlflow_database: str) -> None:
    from mlflow import MlflowClient

    await broken_off_and_continued(
        tmp_path, of_kind("mlflow", tracking_uri=mlflow_database, experiment="e")
    )
    client = MlflowClient(tracking_uri=mlflow_database)
    place = client.get_experiment_by_name("e")
    (run,) = client.search_runs([place.experiment_id])
    assert (run.info.run_name, run.info.status) == ("a", "FINISHED")
    assert run.data.params["algorithm.params.batch_size"] == "2"
    history = sorted(
        (metric.step, metric.value)
        for metric in client.get_metric_history(run.info.run_id, "train_mean_nll")
    )
    rows = table(tmp_path / "runs", "a")
    assert history == [(row["step"], row["train_mean_nll"]) for row in rows]
    scores = client.get_metric_history(run.info.run_id, "val/val/reward/mean")
    assert {metric.step for metric in scores} == {0, 3, 6, 9, 12}


async def test_trackio_keeps_a_local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # read when it is imported
    pytest.importorskip("trackio")
    await finished(experiment(tmp_path / "runs", callbacks=[of_kind("trackio", project="p")]))
    from trackio.sqlite_storage import SQLiteStorage

    assert list(SQLiteStorage.get_max_steps_for_runs("p").values()) == [12]


def test_a_library_that_is_missing_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else real(name, *a)
    )
    _, problems = check_experiment(document(callbacks=[of_kind("wandb")]))
    (problem,) = [p for p in problems if p.where == "callbacks.wandb"]
    assert problem.what == "the library wandb is not installed"
    assert problem.remedy == "pip install 'flowtune[wandb]'"


def test_settings_are_the_experiment_without_its_rows(tmp_path: Path) -> None:
    settings = settings_of(experiment(tmp_path, tags=["demo"]))
    assert settings["algorithm.params.learning_rate"] == 1e-4
    assert settings["evaluations.0.name"] == "val"
    assert settings["tags"] == ["demo"]
    assert not any("rows" in name.split(".") for name in settings)


# --- callbacks that fail ------------------------------------------------------------------------


@pytest.fixture
def breaking() -> Iterator[None]:
    @register_callback("breaking")
    class Breaking(Callback):
        """Fails at each step from the third on."""

        def __init__(self, cfg: CallbackConfig) -> None:
            self.cfg = cfg

        def on_step(self, row: Any) -> None:
            if row["step"] >= 3:
                raise OSError("no room")

    yield
    CALLBACKS.forget("breaking")


@pytest.mark.usefixtures("breaking")
async def test_a_failure_is_told_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await finished(experiment(tmp_path, callbacks=[of_kind("breaking")]))
    assert len(table(tmp_path, "a")) == 12
    told = [record for record in caplog.records if "failed in on_step" in record.message]
    assert [record.levelno for record in told] == [logging.ERROR] + [logging.WARNING] * 9
    assert told[0].message == "callback Breaking failed in on_step"


@pytest.mark.usefixtures("breaking")
async def test_a_failure_ends_the_run_if_it_is_set_to(tmp_path: Path) -> None:
    callback = of_kind("breaking") | {"on_error": "stop"}
    with pytest.raises(CallbackFailed, match=r"Breaking failed in on_step: OSError: no room"):
        await finished(experiment(tmp_path, callbacks=[callback]))
