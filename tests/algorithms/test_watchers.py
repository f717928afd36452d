"""Callbacks: tables, samples, trackers through their own libraries, and those that fail."""

from __future__ import annotations

import asyncio
import csv
import importlib.util
import logging
import math
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from algorithms.base import RunResult
from algorithms.callbacks import (
    Callback,
    CallbackConfig,
    CallbackFailed,
    NoHistory,
    RunPlan,
    check_folder,
)
from algorithms.check import check_experiment
from algorithms.registry import CALLBACKS, register_callback
from algorithms.watchers.mlflow import PATIENCE, MLflow, MLflowConfig, NotTaken, _name
from algorithms.watchers.samples import Samples
from algorithms.watchers.tracking import LAST_WORDS_SECONDS, Tracker, settings_of
from algorithms.watchers.wandb import WandB, WandBConfig
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
    scored = sorted(event.step for event in events.Scalars("val/val/reward/mean"))
    assert scored == [0, 3, 6, 9, 12]  # an evaluation may end behind a later one


async def test_wandb_offline_goes_on_under_the_same_id_in_a_folder_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    told: dict[Path, list[int]] = {}
    send = WandB.log

    def log(self: WandB, step: int, values: Mapping[str, float]) -> None:
        if "train_mean_nll" in values:
            told.setdefault(Path(self._run.dir).parent, []).append(step)
        send(self, step, values)

    monkeypatch.setattr(WandB, "log", log)
    params = {"mode": "offline", "folder": str(tmp_path), "project": "p"}
    await broken_off_and_continued(tmp_path, of_kind("wandb", **params))
    # `wandb sync` sends both to the run of this id, the older one first.
    assert list(told.values()) == [list(range(1, 9)), list(range(5, 13))]
    words = (b"train_mean_nll", b"val/val/reward/mean", b"algorithm")
    for folder in told:
        assert folder.match("wandb/offline-run-*-a")
        async with asyncio.timeout(20):  # a process of wandb's own writes it, and may do so later
            while not all(word in (folder / "run-a.wandb").read_bytes() for word in words):
                await asyncio.sleep(0.05)


@pytest.fixture
def no_wandb_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody at a keyboard, whom nobody may ask; and no credentials of this machine's."""
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setattr("wandb.errors.term.can_use_terminput", lambda: True)
    monkeypatch.setattr("wandb.util.prompt_choices", lambda *a, **kw: pytest.fail("it asked"))


@pytest.mark.usefixtures("no_wandb_key")
def test_wandb_without_a_key_asks_nobody_and_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="there is no API key for Weights & Biases") as caught:
        WandB(WandBConfig())
    (problem,) = caught.value.problems
    assert problem.where == "mode"
    assert "WANDB_API_KEY" in problem.remedy
    assert "mode: offline" in problem.remedy
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(UserError, match="WANDB_API_KEY invalid"):
        WandB(WandBConfig())
    WandB(WandBConfig(mode="offline"))


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


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a server that is not there."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # by default they take four seconds
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


async def test_a_run_goes_on_without_its_mlflow_server(
    tmp_path: Path, nobody: str, caplog: pytest.LogCaptureFixture
) -> None:
    await finished(experiment(tmp_path, callbacks=[of_kind("mlflow", tracking_uri=nobody)]))
    assert len(table(tmp_path, "a")) == 12
    told = [record for record in caplog.records if "callback MLflow failed" in record.message]
    assert told
    assert told[0].exc_info is not None
    assert str(told[0].exc_info[1]).startswith("tracking_uri: ")


async def test_a_run_that_is_to_stop_does_not_begin_without_its_mlflow_server(
    tmp_path: Path, nobody: str
) -> None:
    callback = of_kind("mlflow", tracking_uri=nobody) | {"on_error": "stop"}
    with pytest.raises(CallbackFailed, match=r"MLflow failed in on_start: .*Connection refused"):
        await finished(experiment(tmp_path, callbacks=[callback]))
    assert not (tmp_path / "a/metrics.jsonl").exists()


def test_mlflow_gives_a_request_up_within_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    from mlflow.environment_variables import (
        MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR,
        MLFLOW_HTTP_REQUEST_MAX_RETRIES,
        MLFLOW_HTTP_REQUEST_TIMEOUT,
    )

    for name, value in PATIENCE.items():
        monkeypatch.setenv(name, value)
    retries = MLFLOW_HTTP_REQUEST_MAX_RETRIES.get()
    # urllib3: no pause before the first retry, then factor * 2, factor * 4, ...
    pauses = sum(MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR.get() * 2**n for n in range(1, retries))
    assert (retries + 1) * MLFLOW_HTTP_REQUEST_TIMEOUT.get() + pauses <= LAST_WORDS_SECONDS


class Server:
    """Stands for MLflow's client; answers a batch with the error that is set for its first step."""

    def __init__(self) -> None:
        self.answers: dict[int, Exception] = {}
        self.taken: list[int] = []
        self.ended = False

    def log_batch(self, run: str, metrics: list[Any]) -> None:
        if metrics[0].step in self.answers:
            raise self.answers[metrics[0].step]
        self.taken += sorted({metric.step for metric in metrics})

    def set_terminated(self, run: str, status: str) -> None:
        self.ended = True


@pytest.fixture
def server() -> Server:
    pytest.importorskip("mlflow")
    return Server()


@pytest.fixture
def sending(server: Server, monkeypatch: pytest.MonkeyPatch) -> MLflow:
    """A tracker that is open and about to send; a request takes two numbers: those of one row."""
    monkeypatch.setattr("algorithms.watchers.mlflow.MOST_METRICS", 2)
    tracker = MLflow(MLflowConfig())
    tracker._client, tracker._id, tracker._sent = server, "r", -math.inf
    return tracker


def refused(code: str) -> Exception:
    from mlflow.exceptions import RestException

    error: Exception = RestException({"error_code": code, "message": "no"})
    return error


def away() -> Exception:
    """As MLflow says that nobody answered."""
    from mlflow.exceptions import MlflowException

    error: Exception = MlflowException("API request to http://host failed with exception ...")
    return error


@pytest.mark.parametrize("code", [None, "TEMPORARILY_UNAVAILABLE", "ENDPOINT_NOT_FOUND", "502"])
def test_what_mlflow_does_not_take_is_sent_later(
    server: Server, sending: MLflow, code: str | None
) -> None:
    error = server.answers[1] = refused(code) if code else away()
    with pytest.raises(type(error)):
        sending.log(1, {"loss": 1.0})
    sending.log(2, {"loss": 1.0})  # no other attempt at each step
    server.answers.clear()
    sending.close(RunResult("a", "completed", {}, {}))
    assert server.taken == [1, 2]


def test_what_mlflow_refuses_is_dropped_and_told_and_the_rest_is_sent(
    server: Server, sending: MLflow
) -> None:
    server.answers[1] = refused("INVALID_PARAMETER_VALUE")
    with pytest.raises(NotTaken, match="2 numbers are not in MLflow: INVALID_PARAMETER_VALUE: no"):
        sending.log(1, {"loss": 1.0})
    sending.log(2, {"loss": 1.0})
    sending.log(3, {"loss": 1.0})
    server.answers[2] = refused("INVALID_PARAMETER_VALUE")
    with pytest.raises(NotTaken, match="2 numbers are not in MLflow"):
        sending.close(RunResult("a", "completed", {}, {}))
    assert server.taken == [3]
    assert server.ended


def test_a_server_that_stays_away_is_kept_the_newest_numbers(
    server: Server, sending: MLflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("algorithms.watchers.mlflow.MOST_WAITING", 4)
    server.answers = {step: away() for step in range(1, 6)}
    for step in range(1, 6):
        sending._sent = -math.inf
        with pytest.raises(type(away())):
            sending.log(step, {"loss": 1.0})
        assert len(sending._waiting) <= 4
    server.answers.clear()
    sending._sent = -math.inf
    with pytest.raises(NotTaken, match="6 numbers are not in MLflow: nobody answered for too long"):
        sending.log(6, {"loss": 1.0})
    assert server.taken == [4, 5, 6]


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("val/x/pass@4", "val/x/pass_at_4"),
        ("pass^2", "pass_hat_2"),
        ("share of 'ä' > 50%: a-b.c", "share of _ä_ _ 50__ a-b.c"),
        ("x" * 300, "x" * 250),
    ],
)
def test_mlflow_takes_any_name(name: str, there: str) -> None:
    pytest.importorskip("mlflow")
    from mlflow.utils.validation import _validate_metric

    assert _name(name) == there
    _validate_metric(there, 1.0, 0, 0)


class Endless(Tracker):
    """Its library never answers."""

    kind = "endless"
    module = "json"

    def __init__(self) -> None:
        super().__init__(CallbackConfig())
        self.release = threading.Event()

    def open(self, plan: RunPlan) -> int:
        self.release.wait(30)
        return 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        pytest.fail("the run is over")

    def close(self, result: RunResult) -> None:
        pytest.fail("the run is over")


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endless]:
    for name in ("OPEN_SECONDS", "LAST_WORDS_SECONDS"):
        monkeypatch.setattr(f"algorithms.watchers.tracking.{name}", 0.05)
    tracker = Endless()
    yield tracker
    tracker.release.set()
    if tracker._worker is not None:
        tracker._worker.shutdown()


def test_the_end_of_a_run_waits_for_a_tracker_only_so_long(endless: Endless) -> None:
    endless.on_start(RunPlan("a", "/a", 0, 4, (4,)))
    worker = endless._worker
    assert worker is not None
    endless.on_step({"step": 1, "loss": 1.0})
    with pytest.raises(TimeoutError, match="endless did not take the rest of the run") as caught:
        endless.on_end(RunResult("a", "completed", {}, {}))
    assert caught.value.__cause__ is None
    endless.release.set()
    worker.shutdown()  # nothing that was queued is done


def test_an_error_before_a_tracker_hangs_is_told_with_it(
    endless: Endless, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, opened = threading.Event(), threading.Event()

    def log(step: int, values: Mapping[str, float]) -> None:
        opened.wait(30)
        if step == 1:
            raise OSError("no room")
        hanging.set()
        endless.release.wait(30)

    monkeypatch.setattr(endless, "open", lambda plan: 0)
    monkeypatch.setattr(endless, "log", log)
    monkeypatch.setattr(endless, "close", lambda result: None)
    endless.on_start(RunPlan("a", "/a", 0, 4, (4,)))
    for step in (1, 2):
        endless.on_step({"step": step, "loss": 1.0})
    worker = endless._worker
    assert worker is not None
    opened.set()
    assert hanging.wait(30)
    with pytest.raises(TimeoutError, match="; before that OSError: no room") as caught:
        endless.on_end(RunResult("a", "completed", {}, {}))
    assert isinstance(caught.value.__cause__, OSError)
    endless.release.set()
    worker.shutdown()


def test_rows_behind_one_that_fails_are_sent_when_a_run_is_continued(
    endless: Endless, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Before(NoHistory):
        def metrics(self) -> list[dict[str, Any]]:
            return [{"step": step, "loss": 1.0} for step in (1, 2, 3)]

    sent: list[int] = []

    def log(step: int, values: Mapping[str, float]) -> None:
        sent.append(step)
        if step == 1:
            raise OSError("no room")

    monkeypatch.setattr(endless, "open", lambda plan: 0)
    monkeypatch.setattr(endless, "log", log)
    with pytest.raises(OSError, match="no room"):
        endless._open(RunPlan("a", "/a", 3, 4, (4,), history=Before()))
    assert sent == [1, 2, 3]


def test_a_run_that_is_to_stop_does_not_begin_while_its_tracker_opens(endless: Endless) -> None:
    endless.on_start(RunPlan("a", "/a", 0, 4, (4,)))  # any other does
    again = Endless()
    again.release, again.stops_the_run = endless.release, True
    with pytest.raises(TimeoutError, match="endless did not begin its run in 0 s"):
        again.on_start(RunPlan("a", "/a", 0, 4, (4,)))
    endless.release.set()
    assert again._worker is not None
    again._worker.shutdown()


async def test_trackio_goes_on_with_the_same_local_run(tmp_path: Path) -> None:
    trackio = pytest.importorskip("trackio")
    await broken_off_and_continued(tmp_path, of_kind("trackio", project="p"))
    (run,) = trackio.Api().runs("p")
    assert run.name == "a"
    assert run.config["algorithm.params.batch_size"] == 2
    from trackio.sqlite_storage import SQLiteStorage  # as `trackio get metric` reads it

    def values(metric: str) -> list[tuple[int, float]]:
        found = SQLiteStorage.get_metric_values("p", "a", metric)
        return [(value["step"], value["value"]) for value in found]

    rows = {row["step"]: row["train_mean_nll"] for row in table(tmp_path / "runs", "a")}
    found = values("train_mean_nll")
    assert dict(found) == pytest.approx(rows)
    # It had the rows up to 8, the checkpoint that was lost, and gets those behind 4 again.
    assert sorted(step for step, _ in found) == sorted([*range(1, 13), *range(5, 9)])
    assert {step for step, _ in values("val/val/reward/mean")} == {0, 3, 6, 9, 12}


def test_a_library_that_is_missing_is_named_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else real(name, *a)
    )
    _, problems = check_experiment(document(callbacks=[of_kind("wandb")]))
    (problem,) = [p for p in problems if p.where == "callbacks[0].kind"]
    assert problem.what == "the library wandb is not installed"
    assert problem.remedy == "pip install 'flowtune[wandb]'"


def test_settings_are_the_experiment_without_its_rows(tmp_path: Path) -> None:
    settings = settings_of(experiment(tmp_path, tags=["demo"]))
    assert settings["algorithm.params.learning_rate"] == 1e-4
    assert settings["evaluations.0.name"] == "val"
    assert settings["tags"] == ["demo"]
    assert not any("rows" in name.split(".") for name in settings)


# --- callbacks that fail ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "field", "module"),
    [
        ("csv", "callbacks[0].params.folder", "csv"),
        ("tensorboard", "callbacks[0].params.folder", "tensorboard"),
        ("wandb", "callbacks[0].params.folder", "wandb"),
        ("mlflow", "callbacks[0].params.tracking_uri", "mlflow"),
        ("trackio", "TRACKIO_DIR", "trackio"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, field: str, module: str
) -> None:
    pytest.importorskip(module)
    (tmp_path / "file").touch()
    folder = f"{tmp_path}/file/below"
    params: dict[str, Any] = {"folder": folder}
    if kind == "wandb":
        params["mode"] = "offline"
    if kind == "mlflow":
        params = {"tracking_uri": f"sqlite:///{folder}/mlflow.db"}
    if kind == "trackio":
        params = {}
        monkeypatch.setenv("TRACKIO_DIR", folder)
    _, problems = check_experiment(document(callbacks=[of_kind(kind, **params)]))
    (problem,) = [p for p in problems if p.where == field]
    assert problem.what == f"{tmp_path}/file is a file, and no folder"
    assert problem.remedy == "name another folder, or let this user write there"
    check_folder("x", tmp_path / "made/later")
    assert not (tmp_path / "made").exists()


def test_a_folder_that_the_environment_names_is_called_by_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/file/mlflow.db")
    with pytest.raises(UserError, match=r"MLFLOW_TRACKING_URI: .* is a file, and no folder"):
        MLflow(MLflowConfig())


def test_a_folder_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    with pytest.raises(UserError, match=f"f: {tmp_path} cannot be written"):
        check_folder("f", tmp_path / "new")


async def test_no_backend_is_opened_for_a_callback_that_cannot_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("algorithms.opening._open_backend", lambda *a: pytest.fail("costly"))
    (tmp_path / "file").touch()
    spec = experiment(tmp_path / "runs", callbacks=[of_kind("csv", folder=f"{tmp_path}/file")])
    with pytest.raises(UserError, match="is a file, and no folder"):
        await finished(spec)


@pytest.mark.parametrize("kind", sorted(CALLBACKS.rows()))
def test_a_parameter_that_there_is_not_is_named(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        experiment(tmp_path, callbacks=[of_kind(kind, colour="red")])
    assert any("colour" in str(problem) for problem in caught.value.problems)


HOOKS = ("on_start", "on_step", "on_evaluation", "on_save", "on_notice", "on_end")
QUESTIONS = ("evaluations_awaited", "early_end")


@pytest.mark.parametrize("hook", [*HOOKS, *QUESTIONS])
async def test_a_failure_in_any_hook_is_told_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    def fails(self: Callback, *args: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(Samples, hook, fails)
    run = await finished(experiment(tmp_path, callbacks=[of_kind("samples")]))
    if hook == "on_notice":
        run.tell("on_notice", "a word")
    assert len(table(tmp_path, "a")) == 12
    told = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.message for record in told] == [f"callback Samples failed in {hook}"]


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


async def test_another_failure_of_the_same_method_is_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(self: Callback, row: Mapping[str, float]) -> None:
        raise KeyError("loss") if row["step"] % 2 else OSError("no room")

    monkeypatch.setattr(Samples, "on_step", fails)
    await finished(experiment(tmp_path, callbacks=[of_kind("samples")]))
    told = [record for record in caplog.records if "failed in on_step" in record.message]
    assert [record.levelno for record in told] == [logging.ERROR] * 2 + [logging.WARNING] * 10


@pytest.mark.usefixtures("breaking")
async def test_a_failure_ends_the_run_if_it_is_set_to(tmp_path: Path) -> None:
    callback = of_kind("breaking") | {"on_error": "stop"}
    with pytest.raises(CallbackFailed, match=r"Breaking failed in on_step: OSError: no room"):
        await finished(experiment(tmp_path, callbacks=[callback]))
